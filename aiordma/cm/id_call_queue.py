"""IdCallQueue: the calls on an id that other threads make, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop import SerialJobs, is_forked_child
from aiordma.rdmacm import IdCalls

if TYPE_CHECKING:
    from aiordma.dispatch import CallReader


class IdCallQueue(SerialJobs):
    """Calls on one id that block. A call begins when all earlier ones have ended.

    A worker thread of Python makes the jobs of submit(). A thread of C makes IdCalls, which do not
    need the interpreter's lock. So they are not delayed while the loop is busy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader: CallReader | None = None
        """Has threads of C make the calls, while the id uses the channel that its loop shares."""
        self.channel_lock = threading.Lock()
        """Held during a call that uses the channel of the id."""

    def submit_calls(
        self,
        calls: IdCalls,
        on_end: Callable[[], None],
        is_cancelled: Callable[[], bool] | None = None,
    ) -> bool:
        """Have a thread of C make the calls, then have the loop call `on_end`.

        Nothing happens if `is_cancelled()` is true when they could begin. Return False if they are
        never made: see add(). Call it only if there is a `reader`.
        """
        reader = self.reader
        assert reader is not None

        def start() -> None:
            if is_forked_child() or (is_cancelled is not None and is_cancelled()):
                self.ended()
                return
            self.channel_lock.acquire()
            reader.submit(calls, end)

        def end() -> None:
            self.channel_lock.release()
            try:
                self.ended()  # a Ctrl-C can interrupt the job that it runs
            finally:
                on_end()

        return self.add(start)
