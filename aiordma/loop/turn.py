"""Turn: how long the loop's thread has been kept from the loop by those who poll instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.loop.waiting import wake
from aiordma.loop.workers import post

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

# So long one turn of the loop may be spent on polling: timers and other tasks wait meanwhile.
TURN_NANOSECONDS = 1_000_000


class Turn:
    """The current turn of a loop, as far as polling needs to know of it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._began: int | None = None

    def is_used_up(self, now: int) -> bool:
        """Whether polling has taken as much of it as it may; `now` is time.monotonic_ns()."""
        if self._began is None:
            self._began = now
            post(self._loop, self._begin_next)
        return now - self._began > TURN_NANOSECONDS

    def _begin_next(self) -> None:
        self._began = None

    async def end(self) -> None:
        """Let the loop have its turn. Cancelling does nothing else."""
        future = self._loop.create_future()
        post(self._loop, lambda: None if future.done() else wake(future))
        await future
