"""BusyPoll: polling of the completion queue before a wait parks on the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.dispatch.adaptive_polling import AdaptivePolling
    from aiordma.dispatch.loop_device import LoopDevice
    from aiordma.dispatch.shared_completion_queue import SharedCompletionQueue

# The longest single poll in C. A signal, such as Ctrl-C, is handled only after it.
MAX_POLL_NS = 1_000_000


class BusyPoll:
    """Polling that trades processor time for latency: the task does not wait for the event loop.

    A task that polls blocks the loop's thread, but it yields to the loop regularly: see
    LoopTimeBudget.
    """

    __slots__ = ("_loop_device", "_queue", "is_on", "nanoseconds")

    def __init__(self, loop_device: LoopDevice, seconds: float) -> None:
        self._loop_device = loop_device
        self.nanoseconds = int(seconds * 1e9)
        self._queue: SharedCompletionQueue | None = None
        self.is_on = self.nanoseconds > 0
        """True if `seconds` is not 0."""

    def open(self, queue: SharedCompletionQueue) -> None:
        """Poll `queue` from now on."""
        self._queue = queue

    async def yield_to_loop(self) -> None:
        """Let the loop run an iteration, so that polling may go on. Cancelling only ends the wait.

        For a task whose poll ended because the loop had work to do.
        """
        await self._loop_device.budget.yield_to_loop()

    async def until_adaptively(
        self, is_over: Callable[[], bool], nanoseconds: int, policy: AdaptivePolling
    ) -> bool:
        """Poll as until(), for a wait with this policy. Return `is_over()`, and note it there.

        It does not end for other tasks if the user has set a polling time. Cancelling only ends the
        polling.
        """
        await self.until(is_over, nanoseconds, None if self.is_on else policy)
        found = is_over()
        policy.polled(found)
        return found

    async def until(
        self,
        is_over: Callable[[], bool],
        nanoseconds: int,
        policy: AdaptivePolling | None = None,
    ) -> None:
        """Poll until `is_over()` returns True, or for `nanoseconds`.

        With a `policy`, it lets the loop run when other tasks have completions to handle, or ends
        then: as the policy says. Requests in unposted post lists are posted first.

        Cancelling only ends the polling.
        """
        queue = self._queue
        if nanoseconds <= 0 or queue is None:
            return
        loop_device = self._loop_device
        budget = loop_device.budget
        if budget.is_batching:
            await budget.yield_to_loop()
        now = time.monotonic_ns()
        end = now + nanoseconds
        queue.pollers += 1
        try:
            while now < end and not is_over():
                if policy is not None and budget.is_preempted:
                    if not policy.may_go_on():
                        break
                    await budget.yield_to_loop()
                elif budget.is_exhausted(now):
                    await budget.yield_to_loop()
                else:
                    loop_device.poll_for(queue, min(end - now, MAX_POLL_NS))
                now = time.monotonic_ns()
        finally:
            loop_device.stop_polling(queue)
