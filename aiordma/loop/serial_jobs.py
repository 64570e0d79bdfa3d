"""SerialJobs: jobs that other threads run one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from aiordma.errors import LocalClosed
from aiordma.loop.forked import is_forked_child
from aiordma.loop.workers import WorkerPool, run_job, worker_pool

logger = logging.getLogger(__name__)


class SerialJobs:
    """Jobs that other threads run one after the other, in order.

    No thread blocks while a job waits for the one before it.
    """

    def __init__(self) -> None:
        self._starts: list[Callable[[], None]] = []  # mostly empty: a deque takes 600 bytes
        # An object that is collected while the lock is held can add a job, too.
        self._lock = threading.RLock()
        self._busy = self._has_last = False

    def submit(self, job: Callable[[], None], pool: WorkerPool = worker_pool) -> None:
        """Have a thread of `pool` run `job` after all earlier jobs, even if one of them raised.

        Raises:
            LocalClosed: as add().
        """

        def run() -> None:
            run_job(job)
            self.ended()

        self.add(lambda: pool.submit(run))

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which does not block, after all earlier jobs: now, if there are none.

        An error of the job is only logged. In a forked child the job is dropped.

        Raises:
            LocalClosed: as add().
            KeyboardInterrupt: the job ran now and was interrupted. It has ended then, too.
        """

        def start() -> None:
            try:
                if not is_forked_child():
                    job()
            except Exception:
                logger.exception("a job failed")
            finally:
                self.ended()

        self.add(start)

    def add(self, start: Callable[[], None], *, is_last: bool = False) -> None:
        """Call `start` when all earlier jobs have ended: now, or in the thread of the one before.

        It starts a job, and must not raise. At the end of the job, ended() must be called, unless
        it is the last one: no job can be added after that.

        Raises:
            LocalClosed: the last job was added before.
        """
        with self._lock:
            if self._has_last:
                raise LocalClosed("closed on this side")
            self._has_last = is_last
            if self._busy:
                self._starts.append(start)
                return
            self._busy = True
        start()

    def ended(self) -> None:
        """Note that a job has ended, and start the next one. Callable from any thread."""
        with self._lock:
            if not self._starts:
                self._busy = False
                return
            start = self._starts.pop(0)
        start()
