"""BusyPoll: a wait that looks at the completion queue for a while before it parks on the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.dispatch.loop_device import LoopDevice, SharedCompletionQueue

# A signal, such as Ctrl-C, is not heard before the end of one look.
MAX_POLL_NS = 1_000_000


class BusyPoll:
    """Trades processor time for latency: no wait on an fd, and no turn of the loop in between.

    Whoever polls keeps the loop's thread, but gives the loop a turn now and then: see Turn.
    """

    __slots__ = ("_loop_device", "_queue", "is_on", "nanoseconds")

    def __init__(self, shared: LoopDevice, seconds: float) -> None:
        self._loop_device = shared
        self.nanoseconds = int(seconds * 1e9)
        self._queue: SharedCompletionQueue | None = None
        self.is_on = self.nanoseconds > 0
        """Whether there is any polling to be done."""

    def open(self, queue: SharedCompletionQueue) -> None:
        """Where the completions come that are waited for."""
        self._queue = queue

    async def until(
        self, is_over: Callable[[], bool], nanoseconds: int, *, preemptible: bool = False
    ) -> None:
        """Poll until that is so, or for so long; or, if it `gives_way`, until others want the loop.

        Requests that wait to be posted with those of the next tasks are posted before.

        Cancelling does nothing but end it.
        """
        queue = self._queue
        if nanoseconds <= 0 or queue is None:
            return
        shared = self._loop_device
        turn = shared.budget
        if turn.is_batching:
            await turn.yield_to_loop()
        now = time.monotonic_ns()
        end = now + nanoseconds
        queue.pollers += 1
        try:
            while now < end and not (is_over() or (preemptible and turn.is_preempted)):
                if turn.is_exhausted(now):
                    await turn.yield_to_loop()
                else:
                    shared.poll_for(queue, min(end - now, MAX_POLL_NS))
                now = time.monotonic_ns()
        finally:
            shared.stop_polling(queue)
