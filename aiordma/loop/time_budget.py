"""Turn: how long the loop's thread has been kept from the loop by those who poll instead."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

from aiordma._native import fast_path
from aiordma.loop.checkpoints import checkpoint_of

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

TURN_NANOSECONDS = fast_path.TURN_NANOSECONDS
# Where the loop itself takes long for a turn, polling lasts so many times longer than that, lest
# most of the time go into turns. But timers and other tasks wait for it.
TIMES_A_TURN = 16
LONGEST_TURN = 5_000_000
# A turn so many times longer than the shortest had others in it.
BUSY_TURN = 4


class Clock(Protocol):
    """Where those who poll, in C too, find when the turn began, and what they may take of it."""

    turn_began: int
    turn_length: int
    told_at: int
    held: int


class Turn:
    """The current turn of a loop, as far as polling needs to know of it.

    It began when a task that polls last came back from the loop: nobody else tells, and a callback
    in each turn would cost more than a turn too many.
    """

    def __init__(self, loop: Loop, clock: Clock) -> None:
        self._clock = clock
        self._cost = LONGEST_TURN
        self._checkpoint = checkpoint_of(loop) or _bare_yield

    def is_used_up(self, now: int) -> bool:
        """Whether polling has taken as much of it as it may; `now` is time.monotonic_ns()."""
        clock = self._clock
        return now - clock.turn_began > clock.turn_length

    @property
    def is_wanted(self) -> bool:
        """Whether polling has found something for others, which they wait for the loop to do."""
        clock = self._clock
        return clock.told_at > clock.turn_began

    @property
    def is_held(self) -> bool:
        """Whether requests wait to be posted when other tasks have had their go."""
        return self._clock.held > 0

    async def end(self) -> None:
        """Let the loop have its turn. Cancelling does nothing else."""
        clock = self._clock
        before, left = clock.turn_began, time.monotonic_ns()
        await self._checkpoint()
        if clock.turn_began != before:
            return  # the turn is another task's, which polls for all
        now = clock.turn_began = time.monotonic_ns()
        clock.turn_length = self._next_length(now - left)

    def _next_length(self, took: int) -> int:
        """How long may be polled after a turn of the loop that took so long."""
        cost = self._cost = min(self._cost, took)
        length = max(TURN_NANOSECONDS, min(TIMES_A_TURN * cost, LONGEST_TURN))
        # Others that have something to do get as much time as those who poll, or more.
        return length if took <= BUSY_TURN * cost else min(length, took)


class _Yield:
    """What asyncio.sleep(0) awaits: the task goes on in the next turn of the loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _bare_yield() -> None:
    await _Yield()
