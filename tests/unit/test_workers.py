"""Worker threads: awaited calls, jobs in order, and threads that start and end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import loops
import pytest
from loops import block_until
from simulator import Simulation
from simulator import world as worlds

from aiordma.loop import SerialJobs, call_threadsafe, running_loop, worker_pool
from aiordma.loop.workers import STARTUP_SECONDS, WorkerPool, make_in_worker, run_in_worker

LONG = 10.0
Jobs = list[Callable[[], None]]


async def test_the_exception_of_a_call_is_raised(simulation: Simulation) -> None:
    name = await run_in_worker(running_loop(), lambda: threading.current_thread().name)
    assert name == "aiordma-worker"
    for error in (ValueError("no"), KeyboardInterrupt(), StopIteration()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises((type(error), RuntimeError)) as caught:
            await run_in_worker(running_loop(), fail)
        is_stop = isinstance(error, StopIteration)
        assert (caught.value.__cause__ if is_stop else caught.value) is error


async def test_an_exception_leaves_no_reference_cycle(simulation: Simulation) -> None:
    class Token:
        pass

    def fail(token: Token) -> None:
        raise ValueError

    token = Token()
    reference = weakref.ref(token)
    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            await run_in_worker(running_loop(), partial(fail, token))
        del token
        await loops.until(lambda: reference() is None, "the thread to leave the call")
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancelled", ["before", "meanwhile", "after", "never"])
async def test_the_object_of_a_cancelled_call_is_discarded_once(
    simulation: Simulation, cancelled: str, fails: bool
) -> None:
    jobs, calls, discards = Jobs(), list[str](), list[tuple[int, str]]()

    def make() -> int:
        worlds.park(2)
        calls.append("made")
        return 1 // 0 if fails else 7

    def discard(thing: int) -> None:
        discards.append((thing, threading.current_thread().name))

    submit = jobs.append if cancelled in ("before", "after") else worker_pool.submit
    task = loops.create_task(make_in_worker(running_loop(), make, discard, submit))
    await loops.sleep(1)
    if cancelled == "after":
        jobs.pop()()  # the loop has not handled the result yet
    if cancelled == "never":
        (result,) = await loops.gather(task, return_exceptions=True)
        assert isinstance(result, ZeroDivisionError) if fails else result == 7
    else:
        await loops.cancel(task)
    assert not discards
    for job in jobs:
        job()
    await loops.sleep(5)
    assert len(calls) == (cancelled != "before")
    is_discarded = cancelled in ("meanwhile", "after") and not fails
    assert discards == [(7, "aiordma-worker")] * is_discarded


def test_call_threadsafe_on_a_closed_loop_does_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_threadsafe(loop, pytest.fail)


class BlockingJobs:
    """Jobs that block until the gate is set, and the threads that have begun and finished them."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[threading.Thread] = []
        self.finished: list[threading.Thread] = []

    def job(self) -> None:
        self.begun.append(threading.current_thread())
        self.gate.wait(LONG)
        self.finished.append(threading.current_thread())

    def wait_begun(self, count: int) -> None:
        block_until(lambda: len(self.begun) == count, f"{count} jobs to begin")

    def finish(self, count: int) -> None:
        self.gate.set()
        block_until(lambda: len(self.finished) == count, f"{count} jobs to end")


@pytest.fixture
def blocking() -> Iterator[BlockingJobs]:
    """Jobs whose gate is set at the end, so that no job outlives its test."""
    made = BlockingJobs()
    yield made
    made.gate.set()


def test_a_pool_starts_no_more_than_max_threads(blocking: BlockingJobs) -> None:
    pool = WorkerPool(max_threads=3, idle_seconds=LONG)
    for _ in range(10):
        pool.submit(blocking.job)
    blocking.wait_begun(3)
    blocking.finish(10)
    assert len(set(blocking.begun)) == 3


def test_no_second_thread_takes_a_job_before_the_first_stalls(blocking: BlockingJobs) -> None:
    pool = WorkerPool(idle_seconds=LONG, stall_seconds=2 * LONG)
    pool.submit(blocking.job)
    blocking.wait_begun(1)
    for _ in range(20):
        pool.submit(blocking.job)
    block_until(lambda: pool._is_watched, "the second thread to watch the first")
    blocking.finish(21)
    assert len(set(blocking.begun)) == 1


def test_after_a_stall_another_thread_takes_the_next_job(blocking: BlockingJobs) -> None:
    """If the thread has stalled already, the next job does not wait at all."""
    pool, done = WorkerPool(idle_seconds=LONG, stall_seconds=0.1), list[float]()
    pool.submit(blocking.job)
    blocking.wait_begun(1)
    taken_at = pool._last_taken
    pool.submit(lambda: done.append(time.monotonic()))
    block_until(lambda: pool._idle == 1 and done, "the second thread to become idle")
    assert done[0] - taken_at >= 0.1
    pool._stall_seconds = 100 * LONG
    pool._last_taken -= 100 * LONG
    pool.submit(lambda: done.append(time.monotonic()))
    block_until(lambda: len(done) == 2, "the idle thread to take the job")
    assert not blocking.finished


def test_a_job_does_not_wait_for_a_thread_that_watches_idle_ones(blocking: BlockingJobs) -> None:
    """The watching thread sleeps until the stall would be over, but no thread is busy any more."""
    pool, done = WorkerPool(idle_seconds=100 * LONG, stall_seconds=100 * LONG), list[float]()
    pool.submit(blocking.job)
    blocking.wait_begun(1)
    pool.submit(blocking.job)
    block_until(lambda: pool._is_watched, "the second thread to watch the first")
    blocking.finish(2)
    block_until(lambda: pool._idle == 2, "both threads to be idle")
    pool.submit(lambda: done.append(time.monotonic()))
    block_until(lambda: bool(done), "an idle thread to take the job")


def test_an_idle_thread_is_used_again_and_ends_after_its_idle_time(blocking: BlockingJobs) -> None:
    pool = WorkerPool(idle_seconds=LONG)
    blocking.gate.set()
    for count in range(1, 6):
        pool.submit(blocking.job)
        blocking.finish(count)
        block_until(lambda: pool._idle == 1, "the thread to become idle")
    assert len(set(blocking.begun)) == 1
    pool = WorkerPool(idle_seconds=0.01)
    for count in (6, 7):
        pool.submit(blocking.job)
        blocking.finish(count)
        block_until(lambda: not pool._threads, "the thread to end")
    assert len(set(blocking.begun)) == 3


def test_no_job_is_lost_while_threads_start_and_end() -> None:
    pool, done = WorkerPool(max_threads=4, idle_seconds=0.0005), list[int]()
    for number in range(500):
        pool.submit(partial(done.append, number))
        if number % 10 == 0:
            time.sleep(0.0006)  # time is the subject: threads end at any moment
    block_until(lambda: len(done) == 500, "all jobs to end")
    assert sorted(done) == list(range(500))


def test_after_ctrl_c_another_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, done = WorkerPool(stall_seconds=LONG), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_start", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.submit(lambda: done.append(1))
    pool._starting_until -= STARTUP_SECONDS
    pool.submit(lambda: done.append(2))
    block_until(lambda: done == [1, 2], "both jobs to end")


def test_an_idle_thread_keeps_no_reference_to_its_last_job() -> None:
    pool, job = WorkerPool(idle_seconds=LONG), BlockingJobs()
    reference = weakref.ref(job)
    job.gate.set()
    pool.submit(job.job)
    del job
    block_until(lambda: reference() is None, "the job to be freed")


def test_an_exiting_interpreter_waits_for_no_job_and_drops_new_ones() -> None:
    code = """
import sys, threading, time
from aiordma.loop import SerialJobs, blocking_pool, worker_pool
for pool in (worker_pool, blocking_pool):
    pool.submit(threading.Event().wait)
while worker_pool._jobs or blocking_pool._jobs: time.sleep(0.001)
submits = worker_pool.submit, blocking_pool.submit, SerialJobs().submit
class Late:
    def __del__(self, submits=submits, sys=sys, print=print):
        for submit in submits:
            submit(lambda: print('ran'))
        print('submitted', sys.is_finalizing())
late = Late()
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("submitted True\n", "")


def test_without_threads_jobs_run_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, done = WorkerPool(), list[str]()

    def start(thread: threading.Thread) -> None:
        if not done:  # the second job is submitted while the thread of the first is being started
            done.append("began")
            pool.submit(lambda: done.append("second"))
            assert done == ["began"]
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        pool.submit(lambda: done.append("first"))
    assert done == ["began", "first", "second"]
    assert pool._threads == 0


def test_without_a_new_thread_a_job_waits_for_an_old_one(
    monkeypatch: pytest.MonkeyPatch, blocking: BlockingJobs
) -> None:
    pool = WorkerPool(max_threads=2, idle_seconds=0.05)
    pool.submit(blocking.job)
    blocking.wait_begun(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        pool.submit(blocking.job)
    blocking.finish(2)
    assert len(set(blocking.begun)) == 1
    block_until(lambda: not pool._threads, "the thread to end")


def test_serial_jobs_run_in_order_one_at_a_time_and_occupy_no_thread_before() -> None:
    jobs, order, queues = SerialJobs(), list[int](), (Jobs(), Jobs())
    pools: list[Any] = [SimpleNamespace(submit=queue.append) for queue in queues]
    for number in range(4):
        jobs.submit(partial(order.append, number), pools[number % 2])
    for number in range(4):
        assert [len(queue) for queue in queues] == [1 - number % 2, number % 2]
        queues[number % 2].pop()()
        assert order == list(range(number + 1))
    assert queues == ([], [])


def test_an_object_that_is_collected_while_a_lock_is_held_submits_a_job() -> None:
    """Garbage is collected in any thread, at any place."""
    pool, jobs, done = WorkerPool(), SerialJobs(), threading.Semaphore(0)
    with pool._lock, jobs._lock:
        pool.submit(done.release)
        jobs.submit(done.release, pool)
    for _ in range(2):
        done.acquire()


def test_serial_jobs_without_a_thread_run_where_they_can() -> None:
    """In the submitting thread, or in the thread of the previous job."""
    jobs, order, queue = SerialJobs(), list[str](), Jobs()
    threadless: Any = SimpleNamespace(submit=lambda job: job())
    pool: Any = SimpleNamespace(submit=queue.append)

    def first() -> None:
        jobs.submit(lambda: order.append("last"), threadless)
        order.append("first")

    jobs.submit(first, threadless)
    assert order == ["first", "last"]
    jobs.submit(lambda: order.append("in the pool"), pool)
    jobs.submit(lambda: order.append("after it"), threadless)
    assert len(order) == 2
    queue.pop()()
    assert order[2:] == ["in the pool", "after it"]


def test_a_serial_job_that_does_not_block_runs_at_once_or_after_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs, order, queue = SerialJobs(), list[str](), Jobs()
    pool: Any = SimpleNamespace(submit=queue.append)
    jobs.run(lambda: order.append("at once"))
    jobs.run(fail)
    assert (order, "no memory for the job" in caplog.text) == (["at once"], True)
    jobs.submit(lambda: order.append("in the pool"), pool)
    jobs.run(lambda: order.append("after it"))
    jobs.submit(lambda: order.append("last"), pool)
    queue.pop()()
    queue.pop()()
    assert order[1:] == ["in the pool", "after it", "last"]


def test_no_serial_job_can_be_added_after_the_last_one() -> None:
    jobs, order, queue = SerialJobs(), list[str](), Jobs()
    pool: Any = SimpleNamespace(submit=queue.append)
    jobs.submit(lambda: order.append("first"), pool)
    assert jobs.add(lambda: order.append("last"), is_last=True)

    def add_more() -> list[object]:
        adds = jobs.submit, jobs.run, jobs.add, partial(jobs.add, is_last=True)
        return [add(lambda: order.append("too late")) for add in adds]

    assert add_more() == [False, None, False, False]
    queue.pop()()
    assert add_more() == [False, None, False, False]
    assert order == ["first", "last"]


def test_ctrl_c_interrupts_a_serial_job_that_runs_at_once() -> None:
    jobs, order = SerialJobs(), list[str]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run(interrupted)
    jobs.run(lambda: order.append("the next one"))
    assert order == ["the next one"]


def fail() -> None:
    raise MemoryError("no memory for the job")


def test_a_job_that_raises_costs_no_thread_and_delays_no_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, jobs, done = WorkerPool(max_threads=1), SerialJobs(), threading.Event()
    for bad in (fail, sys.exit):
        pool.submit(bad)
        jobs.submit(bad, pool)
    jobs.submit(done.set, pool)
    assert done.wait(LONG)
    assert pool._threads == 1
    assert caplog.text.count("a job of a worker thread failed") == 4


def test_a_job_that_raises_in_the_caller_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, done = WorkerPool(), threading.Event()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
    pool.submit(fail)
    pool.submit(done.set)
    assert done.is_set()
    assert "no memory for the job" in caplog.text
