"""LoopTimeBudget: a bound on how long polling keeps the event loop from running."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from aiordma._native import fast_path
from aiordma.loop.checkpoints import yield_of

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

LOOP_BUDGET_NS = fast_path.LOOP_BUDGET_NS
# Some loops take long for an empty iteration. There, polling lasts this many times longer than an
# iteration; otherwise most of the time would go into iterations. The maximum is for timers and
# other tasks, which wait while a task polls.
BUDGET_FACTOR = 16
MAX_LOOP_BUDGET_NS = 5_000_000
# If an iteration takes longer than this many times the shortest, other tasks have run in it.
BUSY_ITERATION_FACTOR = 4


class BudgetState(Protocol):
    """The state of the budget, shared with the code that polls in C. Times are in nanoseconds.

    See struct completion_dispatcher in _native/fast_path/fast_path.h.
    """

    budget_start: int
    budget: int
    notified_at: int
    open_post_lists: int


class LoopTimeBudget:
    """The time that polling can take in the current iteration of the event loop.

    The iteration counts from when a polling task last resumed from the loop. Its real beginning is
    not known: a callback in each iteration would cost more than some superfluous iterations do.
    """

    def __init__(self, loop: Loop, state: BudgetState) -> None:
        self._state = state
        self._shortest = MAX_LOOP_BUDGET_NS
        self._yield = yield_of(loop)

    def is_exhausted(self, now: int) -> bool:
        """Return True if polling has used up the budget; `now` is time.monotonic_ns()."""
        state = self._state
        return now - state.budget_start > state.budget

    @property
    def is_preempted(self) -> bool:
        """True if polling has produced work for other tasks, which need the loop to run."""
        state = self._state
        return state.notified_at > state.budget_start

    @property
    def is_batching(self) -> bool:
        """True if a post list has requests that are posted only after other tasks have run."""
        return self._state.open_post_lists > 0

    async def yield_to_loop(self) -> None:
        """Let the loop run one iteration, and start a new budget. Cancelling only ends the wait."""
        state = self._state
        previous_start, yielded_at = state.budget_start, time.monotonic_ns()
        await self._yield()
        if state.budget_start != previous_start:
            return  # another task has started the budget of this iteration
        now = state.budget_start = time.monotonic_ns()
        state.budget = self._next_budget(now - yielded_at)

    def _next_budget(self, took: int) -> int:
        """Return the budget after an iteration that took `took`, both in nanoseconds."""
        shortest = self._shortest = min(self._shortest, took)
        budget = max(LOOP_BUDGET_NS, min(BUDGET_FACTOR * shortest, MAX_LOOP_BUDGET_NS))
        # Other tasks that have work get at least as much time as polling.
        return budget if took <= BUSY_ITERATION_FACTOR * shortest else min(budget, took)
