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
    from aiordma._native._fast_path import Arrivals, Completions
    from aiordma.verbs import CompletionQueue

# Parking takes so many times what can be seen of it, which is from the reading of the event until
# the task goes on: the kernel has to raise the event, and to wake the loop's thread, before that.
SEEN = 4
LONGEST_SEEN = 500_000
# A wait is short if it takes no longer than parking so many times: that is what a peer takes that
# parks itself, as long as one of the two does.
SHORT = 4
# So often in vain, and no more, looking becomes less frequent each time.
MOST_MISSES = 6


class Outlook:
    """Decides it for one connection's receiver. Times are nanoseconds."""

    __slots__ = ("_arrivals", "_clock", "_is_adaptive", "_missed", "_seen", "_short_waits")

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._is_adaptive = False
        self._clock: Completions | None = None
        self._seen = 0
        self._short_waits = 0
        self._missed = 0

    def open(
        self, completions: Completions, cq: CompletionQueue, busy: int, adaptive: bool
    ) -> None:
        """Begin: `busy` is how long in any case; otherwise as it pays, if it may be `adaptive`."""
        self._is_adaptive = adaptive and not busy
        self._clock = completions
        self._arrivals.look_out(completions, cq.address, busy)

    def close(self) -> None:
        """The queue is about to go."""
        self._clock = None
        self._arrivals.look_out(None, 0, -1)

    def parked(self, began: int, woken: int) -> None:
        """A wait parked at one time, and was woken at another; it goes on now."""
        now = time.monotonic_ns()
        if self._clock is not None:
            self._clock.turn_began = now
        if not self._is_adaptive:
            return
        event = 0 if self._clock is None else self._clock.event_came
        came = event if event >= began else woken  # what others have polled raised no event
        arrivals, wait = self._arrivals, came - began
        seen = min(now - came, LONGEST_SEEN)
        self._seen = (3 * self._seen + seen) // 4 if self._seen else seen
        if self._missed != arrivals.missed:
            self._missed, self._short_waits = arrivals.missed, 0
        longest = SHORT * SEEN * self._seen
        self._short_waits = self._short_waits + 1 if wait < longest else 0
        pays = self._short_waits >= 1 << min(self._missed, MOST_MISSES)
        idle = -1 if self._missed else 0  # not even once: what is found may be for others
        arrivals.patience = min(wait + wait // 2, longest) if pays else idle
