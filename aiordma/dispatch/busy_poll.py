"""BusyPoll: a wait that looks at the completion queue for a while before it parks on the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.dispatch.loop_device import LoopDevice, SharedQueue

# A signal, such as Ctrl-C, is not heard before the end of one look.
LONGEST_LOOK = 1_000_000


class BusyPoll:
    """Trades processor time for latency: no wait on an fd, and no turn of the loop in between.

    Whoever polls keeps the loop's thread, but gives the loop a turn at least every millisecond.
    """

    __slots__ = ("_nanoseconds", "_queue", "_shared", "is_on")

    def __init__(self, shared: LoopDevice, seconds: float) -> None:
        self._shared = shared
        self._nanoseconds = int(seconds * 1e9)
        self._queue: SharedQueue | None = None
        self.is_on = self._nanoseconds > 0
        """Whether there is any polling to be done."""

    def open(self, queue: SharedQueue) -> None:
        """Where the completions come that are waited for."""
        self._queue = queue

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Poll until that is so, or for so long as the options allow, which may be not at all.

        Cancelling does nothing but end it.
        """
        queue = self._queue
        if not self._nanoseconds or queue is None:
            return
        turn = self._shared.turn
        end = time.monotonic_ns() + self._nanoseconds
        while not is_over() and (now := time.monotonic_ns()) < end:
            if turn.is_used_up(now):
                await turn.end()
            else:
                self._shared.spin(queue, min(end - now, LONGEST_LOOK))
