"""LoopTimeBudget: a bound on how long polling keeps the event loop from running."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from aiordma.loop.checkpoints import yield_of

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop


class BudgetState(Protocol):
    """The state of the budget, shared with the code that polls in C. Times are in nanoseconds.

    See struct completion_dispatcher in _native/fast_path/fast_path.h.
    """

    budget_start: int
    budget: int
    notified_at: int
    open_post_lists: int

    def end_yield(self, began: int, budget_start: int, now: int, /) -> None:
        """Start a new budget: the loop has run since `began`, when budget_start was this."""


class LoopTimeBudget:
    """The time that polling can take in the current iteration of the event loop.

    The iteration counts from when a polling task last resumed from the loop. Its real beginning is
    not known: a callback in each iteration would cost more than some superfluous iterations do.
    """

    def __init__(self, loop: Loop, state: BudgetState) -> None:
        self._state = state
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
        budget_start, began = state.budget_start, time.monotonic_ns()
        await self._yield()
        state.end_yield(began, budget_start, time.monotonic_ns())
