"""ConnectTurns: a bound on the connects of an event loop that are under way at once."""

from __future__ import annotations

import itertools

from aiordma.loop import FairSemaphore, Loop
from aiordma.loop.deadline import TOLERANCE

CONNECTS_AT_ONCE = 32
TURN_SECONDS = 2.0
"""A connect that takes longer waits for its peer, not for this loop. It keeps no turn if another
task waits for one."""


class ConnectTurns:
    """Lets tasks connect in turns, first come first served.

    If thousands of tasks began to connect at once, each step of each would wait for the steps of
    all others. The peers would give up before this side has confirmed their replies, and nearly all
    of the work would be done in vain.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._free = FairSemaphore(loop, CONNECTS_AT_ONCE)
        self._began: dict[int, float] = {}
        """When each turn that has not ended began: the oldest one first."""
        self._numbers = itertools.count()
        self._waiting = 0
        self._has_timer = False

    async def begin(self) -> int:
        """Wait for a turn, and return its number. The caller must end() it.

        Cancelling takes none.
        """
        if not self._free.try_acquire():
            self._waiting += 1
            self._set_timer()
            try:
                await self._free.acquire()
            finally:
                self._waiting -= 1
        number = next(self._numbers)
        self._began[number] = self._loop.time()
        self._set_timer()
        return number

    def end(self, number: int) -> None:
        """Let another connect begin. Do nothing if the turn has ended."""
        if self._began.pop(number, None) is not None:
            self._free.release()

    def _set_timer(self) -> None:
        """Have the oldest turn end in time, if a task waits for a turn."""
        if self._waiting and self._began and not self._has_timer:
            self._has_timer = True
            oldest = next(iter(self._began.values()))
            seconds = oldest + TURN_SECONDS - self._loop.time()
            self._loop.call_later(max(0.0, seconds), self._end_old)

    def _end_old(self) -> None:
        """End the turns whose time is over."""
        self._has_timer = False
        limit = self._loop.time() - TURN_SECONDS + TOLERANCE
        for number in [number for number, began in self._began.items() if began <= limit]:
            self.end(number)
        self._set_timer()
