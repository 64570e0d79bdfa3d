"""WriteBuffer: the data that a transport could not post yet. It pauses the protocol."""

from __future__ import annotations

from asyncio import BaseProtocol
from collections import deque
from collections.abc import Callable

DEFAULT_HIGH = 64 * 1024


class WriteBuffer:
    """Bytes in order, with a low and a high water mark. See asyncio.WriteTransport."""

    def __init__(self, on_error: Callable[[Exception, str], None]) -> None:
        """Call `on_error(error, message)` when the protocol raises; the message says where."""
        self._on_error = on_error
        self._waiting: deque[memoryview] = deque()
        self.paused = False
        """True if the protocol is paused."""
        self.size = 0
        """The number of bytes that wait."""
        self.high = DEFAULT_HIGH
        self.low = DEFAULT_HIGH // 4

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the water marks in bytes.

        Raises:
            ValueError: they are not in order.
        """
        if high is None:
            high = DEFAULT_HIGH if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high, self.low = high, low

    def add(self, data: memoryview, protocol: BaseProtocol) -> None:
        """Store `data`, or a copy unless it is of `bytes`. Pause the protocol if that is too much.

        Only `bytes` cannot change until they are sent.
        """
        is_constant = type(data.obj) is bytes
        self._waiting.append(data[:] if is_constant else memoryview(bytes(data)))
        self.size += len(data)
        self.pause_if_full(protocol)

    def pause_if_full(self, protocol: BaseProtocol) -> None:
        """Pause the protocol if the size is above the high water mark and it is not paused."""
        if self.size > self.high and not self.paused:
            self.paused = True
            self._call_protocol(protocol.pause_writing, "protocol.pause_writing() failed")

    def drain(self, write: Callable[[memoryview], int]) -> None:
        """Pass the waiting data to `write` until it takes no more.

        `write` returns the number of bytes that it took.
        """
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            taken = write(first)
            self.size -= taken
            if taken < len(first):
                waiting[0] = first[taken:]
                return
            waiting.popleft()

    def resume_if_low(self, protocol: BaseProtocol) -> None:
        """Resume the protocol if it is paused and the size is at the low water mark or below."""
        if self.paused and self.size <= self.low:
            self.paused = False
            self._call_protocol(protocol.resume_writing, "protocol.resume_writing() failed")

    def clear(self) -> None:
        """Drop the waiting data."""
        self._waiting.clear()
        self.size = 0

    def _call_protocol(self, call: Callable[[], None], where: str) -> None:
        try:
            call()
        except Exception as error:
            self._on_error(error, where)
