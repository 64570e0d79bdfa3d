"""Turn: how long the loop's thread has been kept from the loop by those who poll instead."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

from aiordma._native import fast_path
from aiordma.loop.checkpoints import checkpoint_of

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

LOOP_BUDGET_NS = fast_path.LOOP_BUDGET_NS
# Where the loop itself takes long for a turn, polling lasts so many times longer than that, lest
# most of the time go into turns. But timers and other tasks wait for it.
BUDGET_FACTOR = 16
MAX_LOOP_BUDGET_NS = 5_000_000
# A turn so many times longer than the shortest had others in it.
BUSY_ITERATION_FACTOR = 4


class BudgetState(Protocol):
    """Where those who poll, in C too, find when the turn began, and what they may take of it."""

    budget_start: int
    budget: int
    notified_at: int
    open_post_lists: int


class LoopTimeBudget:
    """The current turn of a loop, as far as polling needs to know of it.

    It began when a task that polls last came back from the loop: nobody else tells, and a callback
    in each turn would cost more than a turn too many.
    """

    def __init__(self, loop: Loop, state: BudgetState) -> None:
        self._state = state
        self._cost = MAX_LOOP_BUDGET_NS
        self._checkpoint = checkpoint_of(loop) or _bare_yield

    def is_exhausted(self, now: int) -> bool:
        """Whether polling has taken as much of it as it may; `now` is time.monotonic_ns()."""
        state = self._state
        return now - state.budget_start > state.budget

    @property
    def is_preempted(self) -> bool:
        """Whether polling has found something for others, which they wait for the loop to do."""
        state = self._state
        return state.notified_at > state.budget_start

    @property
    def is_batching(self) -> bool:
        """Whether requests wait to be posted when other tasks have had their go."""
        return self._state.open_post_lists > 0

    async def yield_to_loop(self) -> None:
        """Let the loop have its turn. Cancelling does nothing else."""
        state = self._state
        before, left = state.budget_start, time.monotonic_ns()
        await self._checkpoint()
        if state.budget_start != before:
            return  # the turn is another task's, which polls for all
        now = state.budget_start = time.monotonic_ns()
        state.budget = self._next_budget(now - left)

    def _next_budget(self, took: int) -> int:
        """How long may be polled after a turn of the loop that took so long."""
        cost = self._cost = min(self._cost, took)
        length = max(LOOP_BUDGET_NS, min(BUDGET_FACTOR * cost, MAX_LOOP_BUDGET_NS))
        # Others that have something to do get as much time as those who poll, or more.
        return length if took <= BUSY_ITERATION_FACTOR * cost else min(length, took)


class _Yield:
    """What asyncio.sleep(0) awaits: the task goes on in the next turn of the loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _bare_yield() -> None:
    await _Yield()
