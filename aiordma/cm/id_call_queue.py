"""IdCallQueue: the calls on an id that other threads make, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.loop import SerialJobs, WorkerPool, is_forked_child, worker_pool
from aiordma.rdmacm import IdCalls

if TYPE_CHECKING:
    from aiordma.dispatch import CallReader


class IdCallQueue:
    """Calls on one id that block. A call begins when all earlier ones have ended.

    A worker thread of Python makes a job. A thread of C makes IdCalls, which do not need the
    interpreter's lock. So they are not delayed while the loop is busy.
    """

    def __init__(self) -> None:
        self.reader: CallReader | None = None
        """Has threads of C make the calls, while the id uses the channel that its loop shares."""
        self.channel_lock = threading.Lock()
        """Held during a call that uses the channel of the id."""
        self._jobs = SerialJobs()

    def submit(self, job: Callable[[], None], pool: WorkerPool = worker_pool) -> None:
        """Have a thread of `pool` run `job`. Callable from any thread."""
        self._jobs.submit(job, pool)

    def run(self, call: Callable[[], None]) -> None:
        """Make a call that does not block: now, or in the thread of the last call under way."""
        self._jobs.run(call)

    def submit_last(self, start: Callable[[], None]) -> None:
        """Call `start`, in any thread. No call begins after that. Callable from any thread."""
        self._jobs.add(start)

    def submit_calls(
        self,
        calls: IdCalls,
        on_end: Callable[[], None],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have a thread of C make the calls, then have the loop call `on_end`.

        Nothing happens if `is_cancelled()` is true when they could begin. Call it only if there is
        a `reader`.
        """
        reader = self.reader
        assert reader is not None

        def start() -> None:
            if is_forked_child() or is_cancelled():
                self._jobs.ended()
                return
            self.channel_lock.acquire()
            reader.submit(calls, end)

        def end() -> None:
            self.channel_lock.release()
            try:
                self._jobs.ended()  # a Ctrl-C can interrupt the job that it runs
            finally:
                on_end()

        self._jobs.add(start)
