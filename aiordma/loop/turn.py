"""Turn: how long the loop's thread has been kept from the loop by those who poll instead."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

from aiordma._native import lanes
from aiordma.loop.checkpoints import checkpoint_of

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

TURN_NANOSECONDS = lanes.TURN_NANOSECONDS


class Clock(Protocol):
    """Where those who poll, in C too, find when the turn began."""

    turn_began: int


class Turn:
    """The current turn of a loop, as far as polling needs to know of it.

    It began when a task that polls last came back from the loop: nobody else tells, and a callback
    in each turn would cost more than a turn too many.
    """

    def __init__(self, loop: Loop, clock: Clock) -> None:
        self._clock = clock
        self._checkpoint = checkpoint_of(loop) or _bare_yield

    def is_used_up(self, now: int) -> bool:
        """Whether polling has taken as much of it as it may; `now` is time.monotonic_ns()."""
        return now - self._clock.turn_began > TURN_NANOSECONDS

    async def end(self) -> None:
        """Let the loop have its turn. Cancelling does nothing else."""
        clock = self._clock
        before = clock.turn_began
        await self._checkpoint()
        if clock.turn_began == before:  # else the turn is another task's, which polls for all
            clock.turn_began = time.monotonic_ns()


class _Yield:
    """What asyncio.sleep(0) awaits: the task goes on in the next turn of the loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _bare_yield() -> None:
    await _Yield()
