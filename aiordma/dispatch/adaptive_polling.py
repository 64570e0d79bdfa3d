"""Outlook: how long to look at the completion queue before a wait parks on the loop.

Parking costs an event, system calls and turns of the loop on the way back: tens of microseconds,
where a message takes a few. Who looks for a little longer than the last wait took, if that was not
much more than parking itself, wins nearly all of it when the next message comes in time, which is
when the peer waits for answers, too. So a wait looks as long as that pays: after short waits, and
the less often the more often it was in vain.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma._native._fast_path import CompletionDispatcher, ReceiveQueue
    from aiordma.verbs import CompletionQueue

# Parking takes so many times what can be seen of it, which is from the reading of the event until
# the task goes on: the kernel has to raise the event, and to wake the loop's thread, before that.
PARKING_FACTOR = 4
MAX_WAKEUP_NS = 500_000
# A wait is short if it takes no longer than parking so many times: that is what a peer takes that
# parks itself, as long as one of the two does.
SHORT_WAIT_FACTOR = 4
# So often in vain, and no more, looking becomes less frequent each time.
MAX_MISSES = 6


class AdaptivePolling:
    """Decides it for one connection's receiver. Times are nanoseconds."""

    __slots__ = (
        "_dispatcher",
        "_is_adaptive",
        "_known_misses",
        "_queue",
        "_short_waits",
        "_wakeup_ns",
    )

    def __init__(self, queue: ReceiveQueue) -> None:
        self._queue = queue
        self._is_adaptive = False
        self._dispatcher: CompletionDispatcher | None = None
        self._wakeup_ns = 0
        self._short_waits = 0
        self._known_misses = 0

    def open(
        self, completions: CompletionDispatcher, cq: CompletionQueue, busy_poll: int, adaptive: bool
    ) -> None:
        """Begin: `busy` is how long in any case; otherwise as it pays, if it may be `adaptive`."""
        self._is_adaptive = adaptive and not busy_poll
        self._dispatcher = completions
        self._queue.set_polling(completions, cq.address, busy_poll)

    def close(self) -> None:
        """The queue is about to go."""
        self._dispatcher = None
        self._queue.set_polling(None, 0, -1)

    def parked(self, began: int, woken: int) -> None:
        """A wait parked at one time, and was woken at another; it goes on now."""
        now = time.monotonic_ns()
        if self._dispatcher is not None:
            self._dispatcher.budget_start = now
        if not self._is_adaptive:
            return
        event = 0 if self._dispatcher is None else self._dispatcher.last_event_at
        came = event if event >= began else woken  # what others have polled raised no event
        queue, wait = self._queue, came - began
        seen = min(now - came, MAX_WAKEUP_NS)
        self._wakeup_ns = (3 * self._wakeup_ns + seen) // 4 if self._wakeup_ns else seen
        if self._known_misses != queue.missed_polls:
            self._known_misses, self._short_waits = queue.missed_polls, 0
        longest = SHORT_WAIT_FACTOR * PARKING_FACTOR * self._wakeup_ns
        self._short_waits = self._short_waits + 1 if wait < longest else 0
        pays = self._short_waits >= 1 << min(self._known_misses, MAX_MISSES)
        idle = -1 if self._known_misses else 0  # not even once: what is found may be for others
        queue.poll_budget = min(wait + wait // 2, longest) if pays else idle
