"""WriteBuffer: what a transport could not post yet, and its protocol's pauses."""

from __future__ import annotations

from asyncio import BaseProtocol
from collections import deque
from collections.abc import Callable

DEFAULT_HIGH = 64 * 1024


class WriteBuffer:
    """Bytes in order, between a low and a high water mark. See asyncio.WriteTransport."""

    def __init__(self, on_error: Callable[[Exception, str], None]) -> None:
        """`on_error` is told of an exception that the protocol raises, and of where it did."""
        self._on_error = on_error
        self._waiting: deque[memoryview] = deque()
        self._paused = False
        self.size = 0
        """Bytes that wait."""
        self.high = DEFAULT_HIGH
        self.low = DEFAULT_HIGH // 4

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the water marks. Raises ValueError if they are not in order."""
        if high is None:
            high = DEFAULT_HIGH if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high, self.low = high, low

    def add(self, data: memoryview, protocol: BaseProtocol) -> None:
        """Keep a copy of `data`; above the high water mark the protocol is paused."""
        self._waiting.append(memoryview(bytes(data)))
        self.size += len(data)
        self.pause_if_full(protocol)

    def pause_if_full(self, protocol: BaseProtocol) -> None:
        """Tell the protocol, if it does not know yet."""
        if self.size > self.high and not self._paused:
            self._paused = True
            self._tell(protocol.pause_writing, "protocol.pause_writing() failed")

    def drain(self, write: Callable[[memoryview], int]) -> None:
        """Give what waits to `write`, which returns how much it took, until it takes no more."""
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
        """Tell the protocol that it may go on, if it was paused and that is so."""
        if self._paused and self.size <= self.low:
            self._paused = False
            self._tell(protocol.resume_writing, "protocol.resume_writing() failed")

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self.size = 0

    def _tell(self, call: Callable[[], None], where: str) -> None:
        try:
            call()
        except Exception as error:
            self._on_error(error, where)
