"""Worker threads for calls that block inside C, and the await for such a call.

They are the library's own, not the loop's default executor, which its users may have filled; and
daemons, so that a call that hangs in the kernel keeps no interpreter from exiting.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from aiordma.loop.checkpoints import cancellation_of
from aiordma.loop.forked import is_forked_child, note_use, refuse_forked_child
from aiordma.loop.inline_wakeup import make_future, run_with_inline_wakeups

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

T = TypeVar("T")

MAX_THREADS = 64
IDLE_SECONDS = 10.0
# While one thread gets on with the jobs, more would only take the interpreter's lock from it and
# from the loop. One that waits in the kernel does not get on: then another takes the next job.
STALL_SECONDS = 0.02
# So long the next thread waits for one that was started and is not there yet.
STARTUP_SECONDS = 0.1


class WorkerPool:
    """Daemon threads, started as they are needed up to a limit, gone again after a while."""

    def __init__(
        self,
        max_threads: int = MAX_THREADS,
        idle_seconds: float = IDLE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._max_threads = max_threads
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._busy = 0
        self._starting_until = 0.0
        self._is_watched = False
        """Whether an idle thread watches how those at work get on."""
        self._last_taken = 0.0

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
            needs_thread = self._needs_thread()
        if needs_thread:
            self._start()

    def _needs_thread(self) -> bool:
        """Have an idle thread look after the jobs; whether that takes a new one, counted here."""
        if self._is_watched:
            return False
        if self._idle:
            self._changed.notify()
            return False
        now = time.monotonic()
        if self._threads >= self._max_threads or now < self._starting_until:
            return False
        self._threads += 1
        self._starting_until = now + STARTUP_SECONDS
        return True

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="aiordma-worker", daemon=True).start()
        except RuntimeError:
            self._no_thread()

    def _no_thread(self) -> None:
        """The system gave no thread: leave the work to those there are, or else to this one."""
        with self._changed:
            self._threads -= 1
            self._starting_until = 0.0
            if self._threads:
                return
            orphaned, self._jobs = self._jobs, deque()
        for job in orphaned:
            job()

    def _work(self) -> None:
        with self._changed:
            self._idle += 1
            self._starting_until = 0.0
        while (job := self._first_job()) is not None:
            while job is not None:
                job()
                job = None  # nothing a job holds may live on while the thread idles
                job = self._next_job()

    def _first_job(self) -> Callable[[], None] | None:
        """Wait for a job that is not left to a thread at work; None: there was none for long."""
        with self._changed:
            leave_at = time.monotonic() + self._idle_seconds
            while (wait := self._wait(leave_at)) > 0:
                self._changed.wait(wait)
                self._is_watched = False
            self._idle -= 1
            if not self._jobs:
                self._threads -= 1
                return None
            self._busy += 1
            job = self._take()
            needs_thread = bool(self._jobs) and self._needs_thread()
        if needs_thread:
            self._start()
        return job

    def _wait(self, leave_at: float) -> float:
        """How long an idle thread has to wait, before it takes a job or leaves."""
        now = time.monotonic()
        if not self._jobs:
            return leave_at - now
        if not self._busy:
            return 0.0
        if self._is_watched:
            return self._idle_seconds
        wait = self._last_taken + self._stall_seconds - now
        self._is_watched = wait > 0
        return wait

    def _next_job(self) -> Callable[[], None] | None:
        """For a thread that has done one. None: it is idle now."""
        with self._changed:
            if self._jobs:
                return self._take()
            self._busy -= 1
            self._idle += 1
            return None

    def _take(self) -> Callable[[], None]:
        self._last_taken = time.monotonic()
        return self._jobs.popleft()


# For calls that take milliseconds, and for those that may sit in the kernel for minutes: these must
# not keep the others waiting.
worker_pool = WorkerPool()
blocking_pool = WorkerPool(max_threads=1024, stall_seconds=0.005)


class SerialJobs:
    """Jobs that worker threads run one after the other, in order; no thread waits for its turn."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[WorkerPool, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._busy = False

    def submit(self, job: Callable[[], None], pool: WorkerPool = worker_pool) -> None:
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


def call_threadsafe(loop: Loop, callback: Callable[[], None]) -> None:
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
        self.future = make_future(loop)
        self.abandoned = False

    def run(self) -> None:
        if self.abandoned:
            return
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        call_threadsafe(self._loop, lambda: run_with_inline_wakeups(self._deliver))

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
    submit: Callable[[Callable[[], None]], None] = worker_pool.submit,
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
    submit: Callable[[Callable[[], None]], None] = worker_pool.submit,
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
            worker_pool.submit(lambda: discard(made[0]))
        raise
    return made[0]
