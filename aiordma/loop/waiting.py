"""Tools for waiting: a queue of waiting tasks, and a fair semaphore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.loop.inline_wakeup import make_future

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop, LoopFuture


def wake(future: LoopFuture) -> None:
    """Wake the task that awaits `future`. Do nothing if its loop is closed."""
    try:  # noqa: SIM105 - for each message, where suppress() would double the cost
        future.set_result(None)
    except RuntimeError:
        pass


WaitQueue = fast_path.WaitQueue
"""A queue of tasks that wait for a change of some state. Each checks the state when woken.

`await queue.wait()` waits for the next `wake_all()`. A wake-up carries no data, so nothing is lost
if a task is cancelled after it was woken. `len(queue)` is the number of tasks that wait.
`woken_at` is the value of time.monotonic_ns() when tasks were woken last.
"""


class FairSemaphore:
    """A semaphore that serves waiting tasks in order.

    Tasks acquire units one at a time; release() takes a count. If a waiting task is cancelled after
    it was granted a unit, the next task gets the unit.
    """

    __slots__ = ("_granted", "_loop", "_waiting", "free")

    def __init__(self, loop: Loop, free: int) -> None:
        self._loop = loop
        self.free = free
        # Lists, because each connection has two semaphores: a deque and a set take a kilobyte.
        self._waiting: list[LoopFuture] = []
        self._granted: list[LoopFuture] = []

    def try_acquire(self) -> bool:
        """Acquire a unit if one is free. None is free while tasks wait. Return True if acquired."""
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    async def acquire(self) -> None:
        """Acquire a unit. Wait if none is free. Cancelling acquires none."""
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
            if future in self._granted:
                self._granted.remove(future)

    def release(self, count: int = 1) -> None:
        """Release `count` units, and grant them to waiting tasks."""
        self.free += count
        if self._waiting:
            self.grant()

    def grant(self) -> None:
        """Grant the free units to waiting tasks."""
        waiting = self._waiting
        while waiting:
            future = waiting[0]
            is_waiting = not future.done()
            if is_waiting and not self.try_acquire():
                return
            del waiting[0]
            if is_waiting:
                self._granted.append(future)
                wake(future)
