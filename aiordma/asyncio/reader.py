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

    def _may_take(self) -> bool:
        """Return True if no bytes come before those that the transport takes."""
        return (
            self._is_direct
            and not self._buffer
            and self._waiter is None
            and not self._eof
            and self._exception is None
        )

    @property
    def _is_direct(self) -> bool:
        """True if the bytes of the transport are for this reader. With TLS they are not."""
        return type(self._transport) is StreamTransport and self._transport.has_reader

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        """Set the transport: see asyncio.StreamReader. Called by connection_made()."""
        super().set_transport(transport)
        if type(transport) is StreamTransport:
            transport.has_reader = True

    async def read(self, n: int = -1) -> bytes:
        """Read up to `n` bytes: see asyncio.StreamReader.read()."""
        if n > 0 and self._may_take():
            data: bytes | None = self._transport.take(n)
            if data is None:
                data = await self._wait(n, has_polled=True)
            if data is not None:
                return data
        return await super().read(n)

    async def readexactly(self, n: int) -> bytes:
        """Read exactly `n` bytes: see asyncio.StreamReader.readexactly()."""
        data: bytes | None = self._transport.take(n) if n > 0 and self._may_take() else None
        if data is not None:
            if len(data) == n:
                return data
            self._buffer.extend(data)
        return await super().readexactly(n)

    async def _wait_for_data(self, func_name: str) -> None:
        if not self._is_direct or self._waiter is not None:
            await super()._wait_for_data(func_name)  # type: ignore[misc]
            return
        # readexactly() has polled just before, if the reader has no bytes.
        has_polled = not self._buffer and func_name == "readexactly"
        data = await self._wait(2 * self._limit, has_polled=has_polled)
        if data is not None:
            self.feed_data(data)

    async def _wait(self, limit: int, *, has_polled: bool) -> bytes | None:
        """Wait until bytes arrive, and return them, at most `limit`.

        None: the transport has passed bytes to the reader, or the end. `has_polled`: True if take()
        has just returned None.

        Raises: the exception of the reader.
        """
        transport = self._transport
        if self._paused:
            self._paused = False
            transport.resume_reading()
        self._waiter = waiter = self._loop.create_future()
        try:
            return await _wait_for_data(transport, waiter, limit, has_polled)
        finally:
            self._waiter = None


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
    core.data_path.core.waiter = None
    try:
        await receiver.poll_readable(has_polled=True)
    finally:
        transport.wait_for_bytes()
    if not waiter.done() and receiver.has_bytes and (data := transport.take(limit)):
        return data
    receiver.waits += 1
    began = time.monotonic_ns()
    await waiter
    core.data_path.polling.parked(began, time.monotonic_ns())
    return None
