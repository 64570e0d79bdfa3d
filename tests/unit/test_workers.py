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

import pytest

from aiordma.loop import (
    SerialJobs,
    blocking_pool,
    call_threadsafe,
    make_in_worker,
    run_in_worker,
    running_loop,
    worker_pool,
)
from aiordma.loop.workers import STARTUP_SECONDS, WorkerPool

TIME_LIMIT = 10.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """The event that blocking jobs wait for. Set at the end, so that no job outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


async def wait_for_event(event: threading.Event) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not event.is_set():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.001)


# --- run_in_worker ---


@pytest.mark.asyncio
async def test_the_result_of_the_call_is_returned() -> None:
    assert await run_in_worker(running_loop(), lambda: 6 * 7) == 42
    name = await run_in_worker(running_loop(), lambda: threading.current_thread().name)
    assert name == "aiordma-worker"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), StopIteration()])
async def test_an_exception_of_the_call_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    caught: BaseException | None = None
    try:
        await run_in_worker(running_loop(), fail)
    except BaseException as raised:
        caught = raised
    if isinstance(error, StopIteration):
        assert isinstance(caught, RuntimeError)
        assert caught.__cause__ is error
    else:
        assert caught is error


@pytest.mark.asyncio
async def test_an_exception_leaves_no_reference_cycle() -> None:
    class Token:
        pass

    token = Token()
    reference = weakref.ref(token)

    def fail(token: Token) -> None:
        raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            await run_in_worker(running_loop(), partial(fail, token))
        del token
        deadline = time.monotonic() + TIME_LIMIT
        while reference() is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.001)  # the thread might not have left the call yet
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_a_call_cancelled_before_it_began_is_never_made() -> None:
    calls: list[None] = []
    jobs: list[Callable[[], None]] = []
    call = run_in_worker(running_loop(), lambda: calls.append(None), jobs.append)
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    jobs.pop()()
    assert calls == []


@pytest.mark.asyncio
async def test_cancelling_returns_at_once_and_the_call_continues(gate: threading.Event) -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(TIME_LIMIT)
        ended.set()

    task = asyncio.create_task(run_in_worker(running_loop(), work))
    await wait_for_event(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    gate.set()
    await wait_for_event(ended)


# --- call_threadsafe ---


def test_call_threadsafe_on_a_closed_loop_does_nothing() -> None:
    loop, called = asyncio.new_event_loop(), list[None]()
    loop.close()
    call_threadsafe(loop, lambda: called.append(None))
    assert called == []


# --- WorkerPool ---


class BlockingJobs:
    """Jobs that block until the gate is set, and a record of the threads that ran them."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self.threads: set[threading.Thread] = set()
        self.running = 0
        self.most_running = 0
        self.finished = 0

    def job(self) -> None:
        with self._lock:
            self.threads.add(threading.current_thread())
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self._gate.wait(TIME_LIMIT)
        with self._lock:
            self.running -= 1
            self.finished += 1


def test_a_pool_starts_no_more_than_max_threads(gate: threading.Event) -> None:
    pool, blocking_jobs = WorkerPool(max_threads=3, idle_seconds=0.05), BlockingJobs(gate)
    for _ in range(10):
        pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.running == 3)
    time.sleep(0.02)
    assert blocking_jobs.most_running == 3
    gate.set()
    wait_until(lambda: blocking_jobs.finished == 10)
    assert len(blocking_jobs.threads) == 3
    assert blocking_jobs.most_running == 3


def test_no_second_thread_starts_before_the_first_stalls(gate: threading.Event) -> None:
    pool, blocking_jobs = (
        WorkerPool(idle_seconds=0.05, stall_seconds=TIME_LIMIT),
        BlockingJobs(gate),
    )
    pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.running == 1)
    for _ in range(20):
        pool.submit(blocking_jobs.job)
    time.sleep(0.02)
    assert blocking_jobs.running == 1
    gate.set()
    wait_until(lambda: blocking_jobs.finished == 21)
    assert len(blocking_jobs.threads) == 1


def test_after_a_stall_another_thread_takes_the_next_job(gate: threading.Event) -> None:
    """If the thread has stalled already, the next job does not wait at all."""
    pool, blocking_jobs = WorkerPool(idle_seconds=TIME_LIMIT, stall_seconds=0.2), BlockingJobs(gate)
    done: list[float] = []
    pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.running == 1)
    taken_at = pool._last_taken
    pool.submit(lambda: done.append(time.monotonic()))
    wait_until(lambda: bool(done))
    assert done[0] - taken_at >= 0.2
    wait_until(lambda: pool._idle == 1)
    pool._stall_seconds = 10 * TIME_LIMIT
    pool._last_taken -= 10 * TIME_LIMIT
    pool.submit(lambda: done.append(time.monotonic()))
    wait_until(lambda: len(done) == 2)
    assert blocking_jobs.running == 1


def test_an_idle_thread_is_used_again(gate: threading.Event) -> None:
    pool, blocking_jobs = WorkerPool(idle_seconds=TIME_LIMIT), BlockingJobs(gate)
    gate.set()

    def is_done(count: int) -> bool:
        return blocking_jobs.finished == count and pool._idle == 1

    for count in range(1, 6):
        pool.submit(blocking_jobs.job)
        wait_until(partial(is_done, count))
    assert len(blocking_jobs.threads) == 1


def test_idle_threads_end_and_new_ones_start(gate: threading.Event) -> None:
    pool, blocking_jobs = WorkerPool(idle_seconds=0.01), BlockingJobs(gate)
    gate.set()
    for _ in range(3):
        pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.finished == 3)
    for thread in list(blocking_jobs.threads):
        thread.join(TIME_LIMIT)
        assert not thread.is_alive()
    pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.finished == 4)


def test_no_job_is_lost_while_threads_start_and_end() -> None:
    pool = WorkerPool(max_threads=4, idle_seconds=0.0005)
    done: list[int] = []
    for number in range(500):
        pool.submit(partial(done.append, number))
        if number % 10 == 0:
            time.sleep(0.0006)
    wait_until(lambda: len(done) == 500)
    assert sorted(done) == list(range(500))


def test_after_ctrl_c_kept_a_thread_from_starting_another_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(stall_seconds=1.0)  # on a busy machine too, no thread overtakes another
    done: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda: done.append(1))
    monkeypatch.undo()
    time.sleep(STARTUP_SECONDS)
    pool.submit(lambda: done.append(2))
    wait_until(lambda: done == [1, 2])
    pool.submit(lambda: done.append(3))
    wait_until(lambda: done == [1, 2, 3])


def test_an_idle_thread_keeps_no_reference_to_its_last_job() -> None:
    class Job:
        def __call__(self) -> None:
            pass

    pool, job = WorkerPool(idle_seconds=2 * TIME_LIMIT), Job()
    reference = weakref.ref(job)
    pool.submit(job)
    del job
    wait_until(lambda: reference() is None)


def test_a_hanging_job_does_not_keep_the_interpreter_from_exiting() -> None:
    code = (
        "import threading; from aiordma.loop import worker_pool, blocking_pool; import time\n"
        "begun = threading.Semaphore(0)\n"
        "def hang(): begun.release(); time.sleep(600)\n"
        "worker_pool.submit(hang); blocking_pool.submit(hang); begun.acquire(); begun.acquire()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize(
    "submit", ["worker_pool.submit", "blocking_pool.submit", "SerialJobs().submit"]
)
def test_a_job_submitted_while_the_interpreter_exits_is_dropped(submit: str) -> None:
    code = (
        "import sys; from aiordma.loop import SerialJobs, blocking_pool, worker_pool\n"
        "class Late:\n"
        f"    def __del__(self, submit={submit}, sys=sys, print=print):\n"
        "        submit(lambda: print('ran'))\n"
        "        print('submitted', sys.is_finalizing())\n"
        "late = Late()\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("submitted True\n", "")


def refuse_thread(*args: object) -> None:
    raise RuntimeError("can't start new thread")


def test_without_any_thread_a_job_runs_in_the_submitting_thread(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    pool, blocking_jobs = WorkerPool(max_threads=1, idle_seconds=0.05), BlockingJobs(gate)
    gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        for count in (1, 2, 3):
            pool.submit(blocking_jobs.job)
            assert blocking_jobs.finished == count
    assert blocking_jobs.threads == {threading.current_thread()}
    pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.finished == 4)
    assert len(blocking_jobs.threads) == 2
    wait_until(lambda: pool._threads == 0)


def test_a_job_submitted_while_a_thread_fails_to_start_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, done = WorkerPool(), list[str]()

    def start(thread: threading.Thread) -> None:
        if not done:  # the second job is submitted while the thread of the first is being started
            done.append("began")
            pool.submit(lambda: done.append("second"))
            assert done == ["began"]
        refuse_thread()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        pool.submit(lambda: done.append("first"))
    assert done == ["began", "first", "second"]
    assert pool._threads == 0


def test_without_a_new_thread_a_job_waits_for_an_existing_one(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    pool, blocking_jobs = WorkerPool(max_threads=2, idle_seconds=0.05), BlockingJobs(gate)
    pool.submit(blocking_jobs.job)
    wait_until(lambda: blocking_jobs.running == 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        pool.submit(blocking_jobs.job)
    assert blocking_jobs.running == 1
    gate.set()
    wait_until(lambda: blocking_jobs.finished == 2)
    assert len(blocking_jobs.threads) == 1
    wait_until(lambda: pool._threads == 0)


# --- make_in_worker ---


class Maker:
    """Makes an object once the gate is set, and records the discarded objects."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.begun = threading.Event()
        self.finished = threading.Event()
        self.made: list[object] = []
        self.discarded: list[object] = []
        self.discarded_in: list[str] = []

    def make(self) -> object:
        self.begun.set()
        assert self.gate.wait(TIME_LIMIT)
        self.made.append(object())
        return self.made[-1]

    def discard(self, thing: object) -> None:
        self.discarded_in.append(threading.current_thread().name)
        self.discarded.append(thing)

    def submit(self, job: Callable[[], None]) -> None:
        def run() -> None:
            job()
            self.finished.set()

        worker_pool.submit(run)


@pytest.mark.asyncio
async def test_make_in_worker_cancelled_before_it_begins_makes_nothing(
    gate: threading.Event,
) -> None:
    maker, jobs = Maker(gate), list[Callable[[], None]]()
    gate.set()
    task = asyncio.create_task(
        make_in_worker(running_loop(), maker.make, maker.discard, jobs.append)
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (job,) = jobs
    job()
    assert (maker.made, maker.discarded) == ([], [])


@pytest.mark.asyncio
async def test_an_object_made_after_cancelling_is_discarded_in_the_worker_thread(
    gate: threading.Event,
) -> None:
    maker = Maker(gate)
    task = asyncio.create_task(
        make_in_worker(running_loop(), maker.make, maker.discard, maker.submit)
    )
    await wait_for_event(maker.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert maker.discarded == []
    gate.set()
    assert maker.finished.wait(TIME_LIMIT)
    assert len(maker.made) == 1
    assert maker.discarded == maker.made
    assert maker.discarded_in == ["aiordma-worker"]


@pytest.mark.asyncio
async def test_cancelling_at_any_time_discards_the_object_once() -> None:
    for _ in range(200):
        made, discarded, done = list[int](), list[int](), threading.Event()

        def make(made: list[int] = made) -> int:
            made.append(1)
            return 1

        def submit(job: Callable[[], None], done: threading.Event = done) -> None:
            def run() -> None:
                job()
                done.set()

            worker_pool.submit(run)

        task = asyncio.create_task(make_in_worker(running_loop(), make, discarded.append, submit))
        await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert done.wait(TIME_LIMIT)
        if isinstance(result, asyncio.CancelledError):
            wait_until(partial(have_equal_length, made, discarded))
        else:
            assert (result, made, discarded) == (1, [1], [])


def have_equal_length(first: list[int], second: list[int]) -> bool:
    return len(first) == len(second)


@pytest.mark.asyncio
async def test_an_error_of_make_is_raised(gate: threading.Event) -> None:
    maker = Maker(gate)

    def fail() -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await make_in_worker(running_loop(), fail, maker.discard, maker.submit)
    assert maker.finished.wait(TIME_LIMIT)
    assert maker.discarded == []


@pytest.mark.asyncio
async def test_an_error_of_make_after_cancelling_discards_nothing(
    gate: threading.Event,
) -> None:
    maker = Maker(gate)

    def fail() -> object:
        maker.make()
        raise ValueError("no")

    task = asyncio.create_task(make_in_worker(running_loop(), fail, maker.discard, maker.submit))
    await wait_for_event(maker.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert maker.finished.wait(TIME_LIMIT)
    assert maker.discarded == []


# --- SerialJobs ---


def test_serial_jobs_run_in_order_and_never_two_at_once() -> None:
    jobs, order = SerialJobs(), list[int]()
    inside = threading.Lock()

    def job(number: int) -> None:
        assert inside.acquire(blocking=False)
        time.sleep(0.0001)
        order.append(number)
        inside.release()

    pools = (worker_pool, blocking_pool, WorkerPool(max_threads=2, idle_seconds=0.01))
    for number in range(100):
        jobs.submit(partial(job, number), pools[number % 3])
    wait_until(lambda: len(order) == 100)
    assert order == list(range(100))


def test_waiting_serial_jobs_occupy_no_thread(gate: threading.Event) -> None:
    pool, jobs, blocking_jobs = (
        WorkerPool(max_threads=2, idle_seconds=0.05),
        SerialJobs(),
        BlockingJobs(gate),
    )
    for _ in range(5):
        jobs.submit(blocking_jobs.job, pool)
    wait_until(lambda: blocking_jobs.running == 1)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(TIME_LIMIT)
    assert blocking_jobs.running == 1


class ThreadlessPool(WorkerPool):
    """A pool that gets no thread from the system: its jobs run in the submitting thread."""

    def submit(self, job: Callable[[], None]) -> None:
        job()


def test_without_any_thread_serial_jobs_run_in_the_submitting_thread() -> None:
    jobs, order = SerialJobs(), list[str]()

    def first() -> None:
        jobs.submit(lambda: order.append("last"), ThreadlessPool())
        order.append("first")

    jobs.submit(first, ThreadlessPool())
    assert order == ["first", "last"]
    done = threading.Event()
    jobs.submit(done.set)
    assert done.wait(TIME_LIMIT)


def test_serial_jobs_without_a_thread_run_where_the_previous_job_ran(
    gate: threading.Event,
) -> None:
    jobs, blocking_jobs, done = SerialJobs(), BlockingJobs(gate), threading.Event()
    jobs.submit(blocking_jobs.job, WorkerPool(idle_seconds=TIME_LIMIT))
    jobs.submit(blocking_jobs.job, ThreadlessPool())
    jobs.submit(blocking_jobs.job, ThreadlessPool())
    jobs.submit(done.set)
    gate.set()
    assert done.wait(TIME_LIMIT)
    assert blocking_jobs.finished == 3
    assert (blocking_jobs.most_running, len(blocking_jobs.threads)) == (1, 1)
