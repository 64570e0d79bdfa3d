"""StreamReader: asyncio's reader, which takes received bytes before it waits for the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiordma.asyncio.transport import StreamTransport


class StreamReader(asyncio.StreamReader):
    """An asyncio.StreamReader for a StreamTransport.

    A read first takes the bytes that have arrived, and polls for them if that pays, as
    ByteStream.receive() does. Only if there are none it waits for the transport to pass data.
    """

    # Attributes of asyncio.StreamReader that its type stubs do not have.
    _transport: Any
    _buffer: bytearray
    _eof: bool
    _paused: bool
    _waiter: asyncio.Future[None] | None
    _exception: BaseException | None
    _limit: int
    _loop: asyncio.AbstractEventLoop

    def _take(self, limit: int) -> bytes | None:
        """Return received bytes, at most `limit`, if no others come before them. Else None."""
        transport = self._transport
        if (
            type(transport) is not StreamTransport  # with TLS it is another one
            or self._buffer
            or self._waiter is not None
            or self._eof
            or self._exception is not None
        ):
            return None
        return transport.take(limit)

    async def read(self, n: int = -1) -> bytes:
        """Read up to `n` bytes: see asyncio.StreamReader.read()."""
        data = self._take(n) if n > 0 else None
        return await super().read(n) if data is None else data

    async def readexactly(self, n: int) -> bytes:
        """Read exactly `n` bytes: see asyncio.StreamReader.readexactly()."""
        data = self._take(n) if n > 0 else None
        if data is not None:
            if len(data) == n:
                return data
            self._buffer.extend(data)
        return await super().readexactly(n)

    async def _wait_for_data(self, func_name: str) -> None:
        transport = self._transport
        if type(transport) is not StreamTransport or self._waiter is not None:
            await super()._wait_for_data(func_name)  # type: ignore[misc]
            return
        if self._paused:
            self._paused = False
            transport.resume_reading()
        # read() and readexactly() have polled just before, if the reader has no bytes.
        has_polled = not self._buffer and func_name in ("read", "readexactly")
        self._waiter = waiter = self._loop.create_future()
        try:
            data = await _wait_for_data(transport, waiter, 2 * self._limit, has_polled)
        finally:
            self._waiter = None
        if data is not None:
            self.feed_data(data)


async def _wait_for_data(
    transport: StreamTransport, waiter: asyncio.Future[None], limit: int, has_polled: bool
) -> bytes | None:
    """Wait until `waiter` is done, or until there are bytes that take() returns.

    Return these, at most `limit`, or None if `waiter` is done: the transport has passed bytes or
    the end. `has_polled`: True if take() has just returned None.

    Raises: the exception of `waiter`.
    """
    if not has_polled and (data := transport.take(limit)) is not None:
        return data
    core, receiver = transport.core, transport.core.receiver
    # The bytes are for this task. Otherwise the polling would end for the transport to read them.
    core.data_path.core.notify_readable = False
    try:
        await receiver.poll_readable(has_polled=True)
    finally:
        core.notify(readable=transport.is_reading())
    if not waiter.done() and receiver.has_bytes and (data := transport.take(limit)):
        return data
    began = time.monotonic_ns()
    await waiter
    core.data_path.polling.parked(began, time.monotonic_ns())
    return None
