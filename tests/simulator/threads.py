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
from typing import Any
from unittest import mock

from aiordma.loop import interrupt, threadsafe_call, workers
from aiordma.rdmacm import device_thread
from simulator import world as worlds
from simulator.world import World


class Threads:
    """The worker threads of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._local = threading.local()
        self._returned = threading.Semaphore(0)
        self._pollers: list[tuple[list[int], _Thread]] = []
        self.alive = 0
        """The number of jobs that are not done."""
        self.guarded: list[tuple[Any, Any]] = []
        """Thread-safe calls that must be made even if their loop is closed."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in a thread, at a time of the schedule."""
        thread = _Thread(self, job)
        self.alive += 1
        self._world.after(self._world.schedule.start(), thread.resume)

    def park(self, seconds: float) -> None:
        """Let the current thread wait in a call. Return at once if it is no worker thread."""
        thread = getattr(self._local, "thread", None)
        if seconds and thread is not None:
            self._world.after(seconds, thread.resume)
            thread.wait()

    def wait_readable(self, fds: list[int]) -> None:
        """Let the current thread wait until one of the descriptors is readable."""
        thread = self._local.thread
        while not _readable(fds):
            self._pollers.append((fds, thread))
            thread.wait()

    def wake_pollers(self) -> bool:
        """Resume a thread whose descriptor is readable. Return True if there was one."""
        for entry in self._pollers:
            if _readable(entry[0]):
                self._pollers.remove(entry)
                entry[1].resume()
                return True
        return False


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
    threads = Threads(world)
    world.before_step.append(threads.wake_pollers)

    def wait_readable(waiting: Any, *fds: int) -> bool:
        threads.wait_readable([*fds, waiting._fd])
        return not waiting.is_set

    with ExitStack() as patches:
        for target, name, value in (
            (workers.WorkerPool, "_needs_thread", lambda pool: True),
            (workers.WorkerPool, "_start", lambda pool: threads.submit(pool._jobs.popleft())),
            (device_thread.DeviceThread, "call", lambda thread, function: function()),
            (device_thread.DeviceThread, "submit", lambda thread, job: threads.submit(job)),
            (
                threadsafe_call._Watcher,
                "watch",
                lambda watcher, loop, once: threads.guarded.append((loop, once)),
            ),
            (interrupt.Interrupt, "wait_readable", wait_readable),
            (worlds, "park", threads.park),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        yield threads
