"""AdaptiveWait: a wait that polls the completion queue first, if that pays.

_native/fast_path/adaptive_polling.c describes when it pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma._native import fast_path

if TYPE_CHECKING:
    from aiordma.dispatch.busy_poll import BusyPoll
    from aiordma.loop import WaitQueue

AdaptivePolling = fast_path.AdaptivePolling
"""The polling policy of the waits of one task at a time."""


class AdaptiveWait:
    """Waits of one task at a time for a condition. They poll first if that pays.

    It is for conditions that completions bring about, and that a WaitQueue reports.
    """

    __slots__ = (
        "_before_parking",
        "_busy",
        "_change",
        "_polling",
        "poll_budget",
        "waits",
    )

    def __init__(
        self, change: WaitQueue, busy: BusyPoll, before_parking: Callable[[], None]
    ) -> None:
        """Call `before_parking` each time before the task waits for `change`."""
        self._change = change
        self._before_parking = before_parking
        self._busy = busy
        self._polling = AdaptivePolling(self)
        self.poll_budget = -1
        """Nanoseconds that the next wait polls. 0 polls once, -1 does not poll."""
        self.waits = 0
        """The number of waits."""

    def open(self, dispatcher: fast_path.CompletionDispatcher, *, adaptive: bool) -> None:
        """Begin to poll. Without it, each wait parks at once."""
        self._polling.open(dispatcher, self._busy.nanoseconds, adaptive)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. Cancelling only ends the wait."""
        if condition():
            return
        self.waits += 1
        busy, budget = self._busy, self.poll_budget
        if budget > 0 and await busy.until_adaptively(condition, budget, self._polling):
            return
        began = time.monotonic_ns()
        while not condition():
            self._before_parking()
            await self._change.wait()
        self._polling.parked(began, self._change.woken_at)
