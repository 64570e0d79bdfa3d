"""SerialJobs: jobs that other threads run one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

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

    def submit(self, job: Callable[[], None], pool: WorkerPool = worker_pool) -> bool:
        """Have a thread of `pool` run `job` after all earlier jobs, even if one of them raised.

        Return False if it never runs: see add().
        """

        def run() -> None:
            run_job(job)
            self.ended()

        return self.add(lambda: pool.submit(run))

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which does not block, after all earlier jobs: now, if there are none.

        An error of the job is only logged. The job is dropped in a forked child, and if the last
        job was added before: see add().

        Raises: KeyboardInterrupt, if the job runs now and is interrupted. It has ended then, too.
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

    def add(self, start: Callable[[], None], *, is_last: bool = False) -> bool:
        """Call `start` when all earlier jobs have ended: now, or in the thread of the one before.

        It starts a job, and must not raise. At the end of the job, ended() must be called, unless
        it is the last one. Return False, and never call `start`, if the last job was added before.
        """
        with self._lock:
            if self._has_last:
                return False
            self._has_last = is_last
            if self._busy:
                self._starts.append(start)
                return True
            self._busy = True
        start()
        return True

    def ended(self) -> None:
        """Note that a job has ended, and start the next one. Callable from any thread."""
        with self._lock:
            if not self._starts:
                self._busy = False
                return
            start = self._starts.pop(0)
        start()
