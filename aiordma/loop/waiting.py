"""Waiting for a condition: a queue of wake-ups, and a bound on how long to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop.inline_wakeup import make_future

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop, LoopFuture


def wake(future: LoopFuture) -> None:
    """Wake the task that awaits `future`. On a closed loop nobody does any more."""
    try:  # noqa: SIM105 - for each message, where suppress() would double the cost
        future.set_result(None)
    except RuntimeError:
        pass


class WaitQueue:
    """Tasks waiting for something to change, which they then look at themselves.

    A wake-up carries nothing, so a task cancelled after it was woken has taken nothing away.
    """

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._futures: list[LoopFuture] = []

    def __len__(self) -> int:
        """Tasks that wait, without those whose wait was cancelled."""
        return sum(not future.done() for future in self._futures)

    async def wait(self) -> None:
        """Wait for a wake-up. Cancelling leaves the queue."""
        future = make_future(self._loop)
        self._futures.append(future)
        try:
            await future
        finally:
            if future in self._futures:
                self._futures.remove(future)

    def wake_all(self) -> None:
        """Wake every task that waits now."""
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                wake(future)


class FairSemaphore:
    """So many slots, taken one at a time, given back in numbers; waiting tasks are served in order.

    A slot that was handed to a task whose wait is then cancelled goes to the next.
    """

    __slots__ = ("_granted", "_loop", "_waiting", "free")

    def __init__(self, loop: Loop, free: int) -> None:
        self._loop = loop
        self.free = free
        self._waiting: deque[LoopFuture] = deque()
        self._granted: set[LoopFuture] = set()

    def try_acquire(self) -> bool:
        """Take a slot if one is free, which none is while anybody waits."""
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    async def acquire(self) -> None:
        """Take a slot, waiting for it if need be. Cancelling takes none."""
        if self.try_acquire():
            return
        future = make_future(self._loop)
        self._waiting.append(future)
        try:
            await future
        except BaseException:
            if future in self._waiting:
                self._waiting.remove(future)
            elif future in self._granted:
                self.release()
            raise
        finally:
            self._granted.discard(future)

    def release(self, count: int = 1) -> None:
        """Give back `count` slots."""
        self.free += count
        while self.free > 0 and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self.free -= 1
                self._granted.add(future)
                wake(future)


class Deadline:
    """A moment after which waiting is over: `expired` turns true, and `wake` is called once."""

    __slots__ = ("_timer", "_wake", "expired")

    def __init__(self, loop: Loop, seconds: float, wake: Callable[[], None]) -> None:
        self.expired = False
        self._wake = wake
        self._timer = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.expired = True
        self._wake()

    def cancel(self) -> None:
        """Forget about it."""
        self._timer.cancel()
