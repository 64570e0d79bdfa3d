"""Adaptive polling: the time that a wait polls the completion queue before it parks on the loop.

A parked wait needs an event, system calls and iterations of the event loop until its task goes on.
That takes tens of microseconds; a message takes a few. If the last wait was not much longer than
that, polling a little longer than the last wait took saves nearly all of this time, provided that
the next message arrives in time. It does when the peer waits for answers, too. So a wait polls only
when that pays: after short waits, and the less often, the more often polling found no message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiordma._native._fast_path import CompletionDispatcher
    from aiordma.dispatch.busy_poll import BusyPoll
    from aiordma.loop import WaitQueue

# The measured part of a wake-up is the time from reading the event until the task goes on. Before
# that the kernel raises the event and wakes the loop's thread. The whole cost of parking is assumed
# to be the measured part times this factor.
PARKING_FACTOR = 4
MAX_WAKEUP_NS = 500_000
# A wait is short if it takes less than the cost of parking times this factor. A peer that parks too
# needs that long to answer, as long as one of the two sides parks.
SHORT_WAIT_FACTOR = 4
# Each missed poll makes polling less frequent, up to this number of misses.
MAX_MISSES = 6


class PollState(Protocol):
    """The state that the policy sets and reads: a ReceiveQueue, or an AdaptiveWait."""

    poll_budget: int
    """Nanoseconds that the next wait polls. 0 polls once, -1 does not poll."""
    missed_polls: int
    """Consecutive polls that found nothing."""


class AdaptivePolling:
    """The polling policy of the waits of one task at a time. Times are in nanoseconds.

    It sets `poll_budget` of its PollState.
    """

    __slots__ = (
        "_dispatcher",
        "_is_adaptive",
        "_known_misses",
        "_short_waits",
        "_state",
        "_wakeup_ns",
    )

    def __init__(self, state: PollState) -> None:
        self._state = state
        self._is_adaptive = False
        self._dispatcher: CompletionDispatcher | None = None
        self._wakeup_ns = 0
        self._short_waits = 0
        self._known_misses = 0

    def open(self, dispatcher: CompletionDispatcher, busy_poll: int, adaptive: bool) -> None:
        """Begin. Each wait polls for `busy_poll`. If that is 0, `adaptive` polls when it pays."""
        self._is_adaptive = adaptive and not busy_poll
        self._dispatcher = dispatcher
        self._state.poll_budget = busy_poll

    def close(self) -> None:
        """Stop polling. Called before the completion queue is destroyed. Idempotent."""
        self._dispatcher = None
        self._state.poll_budget = -1

    def parked(self, began: int, woken: int) -> None:
        """Note that a wait parked at `began`, was woken at `woken`, and goes on now."""
        now = time.monotonic_ns()
        if self._dispatcher is not None:
            self._dispatcher.budget_start = now
        if not self._is_adaptive:
            return
        event = 0 if self._dispatcher is None else self._dispatcher.last_event_at
        arrived = event if event >= began else woken  # without an event if another task polled it
        state, wait = self._state, arrived - began
        wakeup = min(now - arrived, MAX_WAKEUP_NS)
        self._wakeup_ns = (3 * self._wakeup_ns + wakeup) // 4 if self._wakeup_ns else wakeup
        if self._known_misses != state.missed_polls:
            self._known_misses, self._short_waits = state.missed_polls, 0
        longest = SHORT_WAIT_FACTOR * PARKING_FACTOR * self._wakeup_ns
        self._short_waits = self._short_waits + 1 if wait < longest else 0
        pays = self._short_waits >= 1 << min(self._known_misses, MAX_MISSES)
        # After a miss it does not poll even once: the completions might be those of other tasks.
        idle = -1 if self._known_misses else 0
        state.poll_budget = min(wait + wait // 2, longest) if pays else idle


class AdaptiveWait:
    """Waits of one task at a time for a condition. They poll first if that pays.

    It is for conditions that completions bring about, and that a WaitQueue reports.
    """

    __slots__ = ("_busy", "_change", "_polling", "missed_polls", "poll_budget")

    def __init__(self, change: WaitQueue, busy: BusyPoll) -> None:
        self._change = change
        self._busy = busy
        self._polling = AdaptivePolling(self)
        self.poll_budget = -1
        self.missed_polls = 0

    def open(self, dispatcher: CompletionDispatcher, *, adaptive: bool) -> None:
        """Begin to poll. Without it, each wait parks at once."""
        self._polling.open(dispatcher, self._busy.nanoseconds, adaptive)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. Cancelling only ends the wait."""
        if condition():
            return
        if self.poll_budget > 0:
            busy = self._busy
            await busy.until(condition, self.poll_budget, preemptible=not busy.is_on)
            if condition():
                self.missed_polls = 0
                return
            self.missed_polls += 1
        began = time.monotonic_ns()
        while not condition():
            await self._change.wait()
        self._polling.parked(began, self._change.woken_at)
