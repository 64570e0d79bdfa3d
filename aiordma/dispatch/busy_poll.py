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

    Whoever polls keeps the loop's thread, but gives the loop a turn now and then: see Turn.
    """

    __slots__ = ("_queue", "_shared", "is_on", "nanoseconds")

    def __init__(self, shared: LoopDevice, seconds: float) -> None:
        self._shared = shared
        self.nanoseconds = int(seconds * 1e9)
        self._queue: SharedQueue | None = None
        self.is_on = self.nanoseconds > 0
        """Whether there is any polling to be done."""

    def open(self, queue: SharedQueue) -> None:
        """Where the completions come that are waited for."""
        self._queue = queue

    async def until(
        self, is_over: Callable[[], bool], nanoseconds: int, *, gives_way: bool = False
    ) -> None:
        """Poll until that is so, or for so long; or, if it `gives_way`, until others want the loop.

        Requests that wait to be posted with those of the next tasks are posted before.

        Cancelling does nothing but end it.
        """
        queue = self._queue
        if nanoseconds <= 0 or queue is None:
            return
        shared = self._shared
        turn = shared.turn
        if turn.is_held:
            await turn.end()
        now = time.monotonic_ns()
        end = now + nanoseconds
        queue.pollers += 1
        try:
            while now < end and not (is_over() or (gives_way and turn.is_wanted)):
                if turn.is_used_up(now):
                    await turn.end()
                else:
                    shared.spin(queue, min(end - now, LONGEST_LOOK))
                now = time.monotonic_ns()
        finally:
            shared.polled(queue)
