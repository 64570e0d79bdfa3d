"""StreamReceiver: the received bytes of a stream, and the task that waits for them."""

from __future__ import annotations

import time
from operator import index
from typing import TYPE_CHECKING

from aiordma.errors import BusyError
from aiordma.loop import (
    cancellation_of,
    make_future,
    refuse_forked_child,
    schedule_point_of,
)

if TYPE_CHECKING:
    from aiordma.qp.endpoint import Endpoint
    from aiordma.streams.stream_data_path import StreamDataPath


class StreamReceiver:
    """The receiving side of one stream. It does what StreamDataPathCore leaves to Python.

    That is: waiting, the end of the stream, and errors.
    """

    def __init__(
        self,
        endpoint: Endpoint[StreamDataPath],
    ) -> None:
        self._endpoint = endpoint
        self._loop = endpoint.loop
        self._data_path = endpoint.data_path
        self._raise_if_cancelled = cancellation_of(type(endpoint.loop))
        self._schedule_point = schedule_point_of(type(endpoint.loop))
        self.waits = 0
        """The number of waits for bytes, without those of the core."""

    def is_readable(self) -> bool:
        """Return True if read() would return or raise something at once."""
        endpoint, protocol = self._endpoint, self._data_path.protocol
        return bool(
            protocol.inbound.available
            or protocol.peer_finished
            or endpoint.closed_here
            or endpoint.is_drained
        )

    async def receive(self, limit: int) -> bytes:
        """Wait for bytes and return them: see ByteStream.receive().

        The core has none, and cannot wait for some itself.
        """
        if index(limit) < 1:
            raise ValueError(f"max_bytes is {limit}, not at least 1")
        await self.wait_readable(has_polled=True)
        return self.read(limit)

    def read(self, limit: int) -> bytes:
        """Return received bytes, at most `limit`; b"" at the end. Call it only if is_readable.

        Raises: as ByteStream.receive().
        """
        if not (available := self._available()):
            return b""
        return self._data_path.core.read(min(limit, available)) or b""

    def read_into(self, memory: memoryview) -> int:
        """Copy received bytes to `memory`, and return their number; 0 at the end.

        Call it only if is_readable. Raises: as ByteStream.receive().
        """
        return (self._data_path.core.read_into(memory) or 0) if self._available() else 0

    def _available(self) -> int:
        """Return the number of bytes that can be read; 0 at the end."""
        refuse_forked_child()
        endpoint, protocol = self._endpoint, self._data_path.protocol
        if endpoint.closed_here:
            raise endpoint.end_reason()
        available = protocol.inbound.available
        if not available and not protocol.peer_finished:
            raise endpoint.end_reason()
        return available

    async def wait_readable(self, *, has_polled: bool = False) -> None:
        """Wait until is_readable. One task at a time. Cancelling loses nothing.

        `has_polled`: True if read() of the core has just returned None.

        Raises:
            BusyError: another task is receiving.
        """
        core = self._data_path.core
        if core.has_reader:
            raise BusyError("another task is receiving on this stream")
        if self.is_readable() and self._schedule_point is None:
            return
        core.has_reader = True
        try:
            if self._raise_if_cancelled is not None:
                await self._raise_if_cancelled()
            await self.poll_readable(has_polled=has_polled)
            if self._schedule_point is not None and self.is_readable():
                await self._schedule_point()
            if not self.is_readable():
                self.waits += 1
            while not self.is_readable():
                core.waiter = waiter = make_future(self._loop)
                began = time.monotonic_ns()
                await waiter
                self._data_path.polling.parked(began, core.woken_at)
        finally:
            core.has_reader = False
            core.waiter = None

    @property
    def has_bytes(self) -> bool:
        """True if bytes have been received and not read."""
        return self._data_path.protocol.inbound.available > 0

    async def poll_readable(self, *, has_polled: bool) -> None:
        """Poll until is_readable if that pays, as Receiver does.

        `has_polled`: True if read() of the core has just returned None.
        """
        core, busy = self._data_path.core, self._data_path.busy
        if core.poll_budget <= 0 or (has_polled and not core.preempted) or self.is_readable():
            return
        await busy.until_adaptively(self.is_readable, core.poll_budget, self._data_path.polling)
