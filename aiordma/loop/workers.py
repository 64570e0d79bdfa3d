"""Worker threads for calls that block inside C, and the await for such a call.

They are the library's own, not the loop's default executor, which its users may have filled; and
daemons, so that a call that hangs in the kernel keeps no interpreter from exiting.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from aiordma.loop.checkpoints import cancellation_of
from aiordma.loop.forked import is_forked_child, note_use, refuse_forked_child
from aiordma.loop.prompt import future_of, promptly

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

T = TypeVar("T")

MAX_THREADS = 64
IDLE_SECONDS = 10.0


class WorkerPool:
    """Daemon threads, started on demand up to a limit, gone again after a while without work."""

    def __init__(self, max_threads: int = MAX_THREADS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._max_threads = max_threads
        self._idle_seconds = idle_seconds
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Have `job` run by a thread, soon. It must not raise. Callable from any thread.

        Where the system allows not even one thread more, the job blocks its submitter instead: a
        slow loop is better than an id that is never destroyed. When the interpreter exits, no
        thread can start any more, and the kernel clears up what is left.
        """
        if sys.is_finalizing() or is_forked_child():
            return
        note_use()
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs) or self._threads >= self._max_threads:
                self._changed.notify()
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="aiordma-worker", daemon=True).start()
        except RuntimeError:
            self._no_thread()

    def _no_thread(self) -> None:
        """The system gave no thread: leave the work to those there are, or else to this one."""
        with self._changed:
            self._threads -= 1
            if self._threads:
                return
            orphaned, self._jobs = self._jobs, deque()
        for job in orphaned:
            job()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()
            del job  # nothing a job holds may live on while the thread idles

    def _next_job(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            if not self._jobs:
                self._changed.wait_for(lambda: bool(self._jobs), self._idle_seconds)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None


# For calls that take milliseconds, and for those that may sit in the kernel for minutes: these must
# not keep the others waiting.
workers = WorkerPool()
parking = WorkerPool(max_threads=1024)


class SerialJobs:
    """Jobs that worker threads run one after the other, in order; no thread waits for its turn."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[WorkerPool, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._busy = False

    def submit(self, job: Callable[[], None], pool: WorkerPool = workers) -> None:
        """Have a thread of `pool` run `job` after those before it. It must not raise."""
        with self._lock:
            self._jobs.append((pool, job))
            if self._busy:
                return
            self._busy = True
        pool.submit(self._run)

    def _run(self) -> None:
        _, job = self._jobs.popleft()
        job()
        del job
        with self._lock:
            if not self._jobs:
                self._busy = False
                return
            pool, _ = self._jobs[0]
        pool.submit(self._run)


def post(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback` soon; on a closed loop nobody needs it any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class _Call(Generic[T]):
    """One function call on its way through a worker thread and back."""

    def __init__(self, loop: Loop, function: Callable[[], T]) -> None:
        self._loop = loop
        self._function = function
        self._result: T
        self._error: BaseException | None = None
        self.future = future_of(loop)
        self.abandoned = False

    def run(self) -> None:
        if self.abandoned:
            return
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        post(self._loop, lambda: promptly(self._deliver))

    def _deliver(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # breaks the cycle of error, traceback, frame and self
        return self._result


async def run_in_worker(
    loop: Loop,
    function: Callable[[], T],
    submit: Callable[[Callable[[], None]], None] = workers.submit,
) -> T:
    """Await `function()` called by a worker thread, to which `submit` hands it.

    Cancelling returns at once. A call that has not begun by then never begins; one that has runs to
    its end, and its result is dropped: what it makes must be owned by something outside the call.

    Raises:
        RdmaError: this process is a forked child.
    """
    refuse_forked_child()
    if_cancelled = cancellation_of(loop)
    if if_cancelled is not None:
        await if_cancelled()
    call = _Call(loop, function)
    submit(call.run)
    try:
        await call.future
    except BaseException:
        call.abandoned = True
        raise
    return call.result()


async def make_in_worker(
    loop: Loop,
    make: Callable[[], T],
    discard: Callable[[T], None],
    submit: Callable[[Callable[[], None]], None] = workers.submit,
) -> T:
    """Await what `make()` makes in a worker thread.

    Cancelling returns at once; what is made nevertheless is given to `discard`, in that thread.
    """
    claim = threading.Lock()  # whoever comes second, the maker or the canceller, discards
    made: list[T] = []

    def make_or_discard() -> None:
        thing = make()
        made.append(thing)
        if not claim.acquire(blocking=False):
            discard(thing)

    try:
        await run_in_worker(loop, make_or_discard, submit)
    except BaseException:
        if not claim.acquire(blocking=False) and made:
            workers.submit(lambda: discard(made[0]))
        raise
    return made[0]
