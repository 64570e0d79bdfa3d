"""Worker threads in virtual time: one runs at a time, when the world says so.

The threads are real, so a job runs on a thread of its own as it does in production. But a thread
runs only while the event loop's thread waits for it: until its job is done, or until it waits
inside a simulated call. So the order of everything is the world's.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest import mock

from aiordma._native import lib
from aiordma.cm import id_call_queue, id_waits, sync_id
from aiordma.dispatch import loop_device
from aiordma.loop import interrupt, threadsafe_call, workers
from aiordma.qp import last_receive, shared_receives
from aiordma.rdmacm import device_thread, id_calls
from simulator import world as worlds
from simulator.world import Stuck, World


class Threads:
    """The worker threads of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._local = threading.local()
        self._returned = threading.Semaphore(0)
        self._waiting: list[tuple[Callable[[], object], _Thread]] = []
        self.alive = 0
        """The number of jobs that are not done."""
        self._guarded: list[tuple[Any, Any]] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in a thread, at a time of the schedule."""
        thread = _Thread(self, job)
        self.alive += 1
        self._world.after(self._world.schedule.start(), thread.resume)

    @property
    def is_worker(self) -> bool:
        """True in a worker thread."""
        return getattr(self._local, "thread", None) is not None

    def park(self, seconds: float) -> None:
        """Let the current thread wait in a call. Return at once if it is no worker thread."""
        thread = getattr(self._local, "thread", None)
        if seconds and thread is not None:
            self._world.after(seconds, thread.resume)
            thread.wait()

    def wait_until(self, is_over: Callable[[], object]) -> None:
        """Let the current thread wait for a condition.

        The loop's thread blocks: nothing but the world and the worker threads goes on.
        """
        thread = getattr(self._local, "thread", None)
        while not is_over():
            if thread is not None:
                self._waiting.append((is_over, thread))
                thread.wait()
            elif not self._world.step(None):
                raise Stuck("the thread of the loop waits for a lock that no thread releases")

    @property
    def now(self) -> float:
        """The virtual time."""
        return self._world.now

    def wake_at(self, moment: float) -> None:
        """Let the waiting threads check their conditions at this time."""
        self._world.at(moment, lambda: None)

    def wait_readable(self, fd: int, limit: float | None) -> bool:
        """Let the current worker thread wait for a descriptor, or until the time `limit`.

        Return False at once if it is no worker thread.
        """
        if not self.is_worker:
            return False
        if limit is not None:
            self.wake_at(limit)
        self.wait_until(lambda: _readable([fd]) or self._world.now >= (limit or inf))
        return True

    def make_guarded_calls(self) -> None:
        """Make the thread-safe calls of closed loops, as the watching thread does."""
        for loop, call in self._guarded:
            if loop.is_closed():
                call.run()
        self._guarded = [entry for entry in self._guarded if not entry[1].is_claimed]

    def guard(self, loop: Any, call: Any) -> None:
        """Make a thread-safe call even if its loop is closed."""
        self._guarded.append((loop, call))

    def resume_waiting(self) -> bool:
        """Resume the threads whose condition has become true. Return True if there were any."""
        ready = [entry for entry in self._waiting if entry[0]()]
        for entry in ready:
            if entry in self._waiting and entry[0]():
                self._waiting.remove(entry)
                entry[1].resume()
        return bool(ready)


class _Lock:
    """A lock. A thread that waits for it lets the others go on."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_locked and blocking and timeout < 0:
            self._threads.wait_until(lambda: not self._is_locked)
        if self._is_locked:
            return False
        self._is_locked = True
        return True

    def release(self) -> None:
        assert self._is_locked
        self._is_locked = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    """A condition with a lock of its own."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(threads)
        self._notified = 0

    def wait_for(self, is_over: Callable[[], bool], timeout: float = inf) -> bool:
        limit = self._threads.now + timeout
        if timeout < inf:
            self._threads.wake_at(limit)
        while not is_over() and self._threads.now < limit:
            seen = self._notified
            self.release()
            self._threads.wait_until(
                lambda seen=seen: self._notified != seen or self._threads.now >= limit  # type: ignore[misc]
            )
            self.acquire()
        return is_over()

    def notify_all(self) -> None:
        self._notified += 1


class _Thread:
    """A worker thread for one job."""

    def __init__(self, threads: Threads, job: Callable[[], None]) -> None:
        self._threads = threads
        self._job: Callable[[], None] | None = job
        self._go = threading.Semaphore(0)
        self._started = False

    def resume(self) -> None:
        """Let the thread run until it waits or ends. Called on the loop's thread."""
        if self._started:
            self._go.release()
        else:
            self._started = True
            threading.Thread(target=self._run, name="aiordma-worker", daemon=True).start()
        self._threads._returned.acquire()

    def wait(self) -> None:
        """Let the loop's thread go on until resume(). Called in this thread."""
        self._threads._returned.release()
        self._go.acquire()

    def _run(self) -> None:
        self._threads._local.thread = self
        job, self._job = self._job, None
        try:
            assert job is not None
            job()
        except BaseException as error:
            self._threads._world.violate(f"a job in a worker thread raised {error!r}")
        finally:
            del job
            self._threads.alive -= 1
            self._threads._returned.release()


def _readable(fds: list[int]) -> bool:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


@contextmanager
def simulated_threads(world: World) -> Iterator[Threads]:
    """Let aiordma use the threads of `world` instead of its own during the block."""
    world.threads = threads = Threads(world)
    world.before_step.append(threads.resume_waiting)

    def wait_readable(waiting: Any, *fds: int) -> bool:
        threads.wait_until(lambda: _readable([*fds, waiting._fd]))
        return not waiting.is_set

    def submit_calls(calls: Any, ended: Any) -> None:
        lib.aiordma_own_id_calls(calls, ended)
        threads.submit(lambda: lib.aiordma_run_id_calls(calls))

    locks: Any = SimpleNamespace(Lock=lambda: _Lock(threads), Condition=lambda: _Condition(threads))
    with ExitStack() as patches:
        for target, name, value in (
            (workers.WorkerPool, "_needs_thread", lambda pool: True),
            (workers.WorkerPool, "_start", lambda pool: threads.submit(pool._jobs.popleft())),
            (device_thread.DeviceThread, "call", lambda thread, function: function()),
            (device_thread.DeviceThread, "submit", lambda thread, job: threads.submit(job)),
            (threadsafe_call._Watcher, "watch", lambda watcher, *call: threads.guard(*call)),
            (interrupt.Interrupt, "wait_readable", wait_readable),
            (worlds, "park", threads.park),
            (id_calls, "submit", submit_calls),
            # Locks that are held during a call of the C libraries.
            (loop_device, "threading", locks),
            (id_waits, "threading", locks),
            (id_call_queue, "threading", locks),
            (sync_id, "threading", locks),
            (shared_receives, "threading", locks),
            (last_receive, "threading", locks),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        yield threads
