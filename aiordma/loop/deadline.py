"""Deadline: the end of the time for a wait. Deadlines of equal length share a timer of their loop.

Each connection sets several deadlines, and nearly all of them are cancelled soon. A timer of the
loop for each of them would cost far more: asyncio makes a dozen Python calls, and trio a task.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

# A timer can fire before its time by a rounding error.
TOLERANCE = 1e-6
# A queue with fewer deadlines keeps its cancelled ones.
KEPT = 64


class Deadline:
    """After `seconds`, the loop sets `expired` and calls `wake` once, unless cancel() was called.

    Created and cancelled on the loop's thread.
    """

    __slots__ = ("at", "expired", "wake")

    def __init__(self, loop: Loop, seconds: float, wake: Callable[[], None]) -> None:
        self.expired = False
        """True if the time is over."""
        self.wake: Callable[[], None] | None = wake
        """None once the deadline has expired or was cancelled."""
        self.at = loop.time() + seconds
        """The value of `loop.time()` at which it expires."""
        reference = _queues.get((id(loop), seconds))
        queue = None if reference is None else reference()
        if queue is None or queue.loop() is not loop:  # the id of a freed loop is used again
            queue = _add_queue(loop, seconds)
        queue.deadlines.append(self)
        if len(queue.deadlines) > queue.limit or not queue.has_timer:
            queue.tidy(loop)

    def expire(self) -> None:
        """Expire now, unless it has expired or was cancelled. Called by the timer."""
        wake, self.wake = self.wake, None
        if wake is not None:
            self.expired = True
            wake()

    def cancel(self) -> None:
        """Cancel the deadline, unless it has expired. Idempotent."""
        self.wake = None


class _Queue:
    """The deadlines of a loop that have the same length. They expire in the order of creation."""

    def __init__(self, loop: Loop, seconds: float) -> None:
        self.loop = weakref.ref(loop)
        self._seconds = seconds
        self.deadlines: deque[Deadline] = deque()
        """Deadlines, of which some were cancelled. A new one is appended by its creator."""
        self.has_timer = False
        """True if the loop will expire the first of them."""
        self.limit = KEPT
        """The number of deadlines above which those that were cancelled are removed."""

    def tidy(self, loop: Loop) -> None:
        """Remove cancelled deadlines if there are too many. Set the timer if there is none."""
        if len(self.deadlines) > self.limit:
            self.deadlines = deque(kept for kept in self.deadlines if kept.wake is not None)
            self.limit = KEPT + 2 * len(self.deadlines)
        if not self.has_timer:
            self._set_timer(loop, self._seconds)

    def _set_timer(self, loop: Loop, seconds: float) -> None:
        # Only the timer refers to the queue: a closed loop is freed together with its deadlines.
        loop.call_later(seconds, lambda: self._expire(loop))
        self.has_timer = True

    def _expire(self, loop: Loop) -> None:
        """Wake the deadlines whose time is over, and set the timer for the first of the others."""
        now = loop.time()
        try:
            while self.deadlines:
                first = self.deadlines[0]
                if first.wake is not None and first.at > now + TOLERANCE:
                    break
                self.deadlines.popleft()
                if first.wake is not None:  # no call for each of those that were cancelled
                    first.expire()
        finally:
            self.has_timer = False
            if self.deadlines:
                self._set_timer(loop, max(0.0, self.deadlines[0].at - now))


def _add_queue(loop: Loop, seconds: float) -> _Queue:
    key, queue = (id(loop), seconds), _Queue(loop, seconds)

    def forget(reference: weakref.ReferenceType[_Queue]) -> None:
        if _queues.get(key) is reference:
            del _queues[key]

    _queues[key] = weakref.ref(queue, forget)
    return queue


# Not a WeakValueDictionary, which makes two Python calls for each deadline.
_queues: dict[tuple[int, float], weakref.ReferenceType[_Queue]] = {}
