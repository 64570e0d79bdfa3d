"""ConnectTurns: a bound on the connects of an event loop that are under way at once."""

from __future__ import annotations

from aiordma.loop import Deadline, FairSemaphore, Loop

CONNECTS_AT_ONCE = 32
TURN_SECONDS = 2.0
"""A connect that takes longer waits for its peer, not for this loop. It keeps no turn."""


class ConnectTurns:
    """Lets tasks connect in turns, first come first served.

    If thousands of tasks began to connect at once, each step of each would wait for the steps of
    all others. The peers would give up before this side has confirmed their replies, and nearly all
    of the work would be done in vain.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._free = FairSemaphore(loop, CONNECTS_AT_ONCE)

    async def begin(self) -> ConnectTurn:
        """Wait for a turn. The caller must end() it. Cancelling takes none."""
        await self._free.acquire()
        return ConnectTurn(self._loop, self._free)


class ConnectTurn:
    """The turn of a connect that is under way."""

    def __init__(self, loop: Loop, free: FairSemaphore) -> None:
        self._free: FairSemaphore | None = free
        self._timer = Deadline(loop, TURN_SECONDS, self._release)

    def _release(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free.release()

    def end(self) -> None:
        """Let another connect begin. Idempotent."""
        self._timer.cancel()
        self._release()
