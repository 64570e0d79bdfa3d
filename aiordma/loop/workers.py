"""Worker threads for calls that block inside C, and functions that await such calls.

The threads belong to the library. The loop's default executor might be filled by the application.
They are daemon threads: a call that hangs in the kernel does not keep the interpreter from exiting.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from aiordma.loop.checkpoints import cancellation_of
from aiordma.loop.forked import is_forked_child, note_use, refuse_forked_child
from aiordma.loop.inline_wakeup import make_future, run_with_inline_wakeups
from aiordma.loop.threadsafe_call import ensure_called

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS = 64
IDLE_SECONDS = 10.0
# While one thread makes progress with the jobs, more threads would only compete with it and with
# the loop for the interpreter's lock. A thread that waits in the kernel makes no progress: if no
# thread has taken a job for this time, another thread takes the next one. A job of a busy process
# can take 40 ms, because it waits for the processor and for the lock, too.
STALL_SECONDS = 0.1
# For this time after a thread was started, no other is started, unless the first has begun to run.
STARTUP_SECONDS = 0.1


class WorkerPool:
    """Daemon threads, started when needed up to a limit. They end after some idle time."""

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
        # An object that is collected while the lock is held can submit a job, too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads = 0
        self._idle = 0
        self._busy = 0
        self._starting_until = 0.0
        self._is_watched = False
        """True if an idle thread watches whether the busy threads make progress."""
        self._last_taken = 0.0

    def submit(self, job: Callable[[], None]) -> None:
        """Have a thread run `job`, soon. Callable from any thread.

        An exception of the job is only logged.

        If the pool has no thread and the system allows none, the job runs in the calling thread: a
        slow loop is better than an id that is never destroyed. In a forked child and while the
        interpreter exits, the job is dropped: the child must not use the parent's objects, and an
        exiting interpreter can start no thread. The kernel destroys the remaining objects then.
        """
        if sys.is_finalizing() or is_forked_child():
            return
        with self._lock:
            self._jobs.append(job)
            needs_thread = self._needs_thread()
        if needs_thread:
            self._start()

    def _needs_thread(self) -> bool:
        """Notify an idle thread of the jobs. Return True if the caller must start a thread.

        The new thread is already counted then. Called with the lock held.
        """
        if self._is_watched and self._busy:
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
        note_use()
        try:
            threading.Thread(target=self._work, name="aiordma-worker", daemon=True).start()
        except RuntimeError:
            self._on_start_failure()

    def _on_start_failure(self) -> None:
        """Leave the jobs to the existing threads, or run them here if there are none.

        Called if the system allows no new thread.
        """
        with self._lock:
            self._threads -= 1
            self._starting_until = 0.0
            if self._threads:
                return
            orphaned, self._jobs = self._jobs, deque()
        for job in orphaned:
            run_job(job)

    def _work(self) -> None:
        with self._lock:
            self._idle += 1
            self._starting_until = 0.0
        while (job := self._first_job()) is not None:
            while job is not None:
                run_job(job)
                job = None  # an idle thread must not keep the objects of its last job alive
                job = self._next_job()

    def _first_job(self) -> Callable[[], None] | None:
        """Wait for a job that the busy threads do not take, and return it.

        Return None if the thread was idle for the whole idle time. The thread then ends.
        """
        with self._lock:
            end_at = time.monotonic() + self._idle_seconds
            while (wait := self._seconds_to_wait(end_at)) > 0:
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

    def _seconds_to_wait(self, end_at: float) -> float:
        """Return how long an idle thread waits before it takes a job or ends."""
        now = time.monotonic()
        if not self._jobs:
            return end_at - now
        if not self._busy:
            return 0.0
        if self._is_watched:
            return self._idle_seconds
        wait = self._last_taken + self._stall_seconds - now
        self._is_watched = wait > 0
        return wait

    def _next_job(self) -> Callable[[], None] | None:
        """Return the next job for a busy thread, or None and count the thread as idle."""
        with self._lock:
            if self._jobs:
                return self._take()
            self._busy -= 1
            self._idle += 1
            return None

    def _take(self) -> Callable[[], None]:
        self._last_taken = time.monotonic()
        return self._jobs.popleft()


worker_pool = WorkerPool()
"""The threads for calls that take milliseconds."""
blocking_pool = WorkerPool(max_threads=1024, stall_seconds=0.005)
"""The threads for calls that can wait for minutes, and that must not delay each other."""


def run_job(job: Callable[[], None]) -> None:
    """Run a job. An exception is only logged: the thread has other jobs to run."""
    try:
        job()
    except BaseException:
        logger.exception("a job of a worker thread failed")


def call_threadsafe(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback` soon. Do nothing if the loop is closed."""
    try:  # noqa: SIM105 - for each call in a worker thread
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass


class _Call(Generic[T]):
    """A function call in a worker thread, whose result a task of `loop` awaits."""

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
        call_threadsafe(self._loop, lambda: run_with_inline_wakeups(self._wake))

    def _wake(self) -> None:
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
    """Return the result of `function()`, called by a worker thread.

    `submit` passes the call to a thread. Cancelling returns at once. A call that has not begun by
    then is never made. A call that has begun runs to its end, and its result is dropped: an object
    that it makes needs an owner outside of the call.

    Raises:
        RdmaError: this process is a forked child.
    """
    refuse_forked_child()
    raise_if_cancelled = cancellation_of(type(loop))
    if raise_if_cancelled is not None:
        await raise_if_cancelled()
    call = _Call(loop, function)
    submit(call.run)
    try:
        await call.future
    except BaseException:
        call.abandoned = True
        raise
    return call.result()


class _Making(Generic[T]):
    """An object that a worker thread makes for a task, which can be cancelled at any time."""

    def __init__(
        self,
        loop: Loop,
        make: Callable[[], T],
        discard: Callable[[T], None],
        on_unmade: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._make = make
        self._discard = discard
        self._on_unmade = on_unmade
        self._lock = threading.Lock()
        self._is_running = False
        self._is_abandoned = False
        self._made: list[T] = []

    def run(self) -> T:
        """Make the object, in the worker thread. Discard it if the task was cancelled meanwhile."""
        with self._lock:
            if self._is_abandoned:
                raise RuntimeError("no task waits for the result")
            self._is_running = True
        try:
            thing = self._make()
        except BaseException:
            if self._ended_abandoned():
                ensure_called(self._loop, self._on_unmade)
            raise
        if self._ended_abandoned(thing):
            self._discard(thing)
        return thing

    def _ended_abandoned(self, *made: T) -> bool:
        """Note that the call has ended. Return True if the task was cancelled meanwhile."""
        with self._lock:
            self._is_running = False
            self._made += made
            return self._is_abandoned

    def abandon(self) -> None:
        """Give up the object, on the loop's thread: the task was cancelled, or run() has failed."""
        with self._lock:
            self._is_abandoned = True
            if self._is_running:
                return  # the worker thread does the rest
        if self._made:
            worker_pool.submit(lambda: self._discard(self._made[0]))
        else:
            self._on_unmade()


async def make_in_worker(
    loop: Loop,
    make: Callable[[], T],
    discard: Callable[[T], None],
    submit: Callable[[Callable[[], None]], None] = worker_pool.submit,
    on_unmade: Callable[[], None] = lambda: None,
) -> T:
    """Return the object that `make()` makes, called by a worker thread.

    Cancelling returns at once. If the object is made nevertheless, a worker thread calls `discard`
    with it. If no object is made, the loop calls `on_unmade`, after a call of `make()` that is
    under way has ended.
    """
    making = _Making(loop, make, discard, on_unmade)
    try:
        return await run_in_worker(loop, making.run, submit)
    except BaseException:
        making.abandon()
        raise
