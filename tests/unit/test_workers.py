"""Worker threads: calls awaited, jobs in order, and threads that come and go."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

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
    """What blocking jobs wait for; opened at the end, so that none outlives its test."""
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
async def test_the_result_comes_back() -> None:
    assert await run_in_worker(running_loop(), lambda: 6 * 7) == 42
    assert await run_in_worker(running_loop(), lambda: None) is None


@pytest.mark.asyncio
async def test_the_function_runs_in_another_thread() -> None:
    name = await run_in_worker(running_loop(), lambda: threading.current_thread().name)
    assert name == "aiordma-worker"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), StopIteration()])
async def test_an_exception_comes_back(error: BaseException) -> None:
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
async def test_an_exception_leaves_no_cycle_behind() -> None:
    class Token:
        pass

    token = Token()
    gone = weakref.ref(token)

    def fail(token: Token) -> None:
        raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            await run_in_worker(running_loop(), lambda token=token: fail(token))
        del token
        deadline = time.monotonic() + TIME_LIMIT
        while gone() is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.001)  # the thread may still be on its way out
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_the_loop_goes_on_meanwhile(gate: threading.Event) -> None:
    task = asyncio.create_task(run_in_worker(running_loop(), lambda: gate.wait(TIME_LIMIT)))
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    assert await task


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
async def test_cancelling_returns_at_once_and_the_call_goes_on(gate: threading.Event) -> None:
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


@pytest.mark.asyncio
async def test_the_failure_of_a_cancelled_call_is_dropped(gate: threading.Event) -> None:
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        gate.wait(TIME_LIMIT)
        raise ValueError

    task = asyncio.create_task(run_in_worker(running_loop(), fail))
    await wait_for_event(begun)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_many_calls_at_once_all_return() -> None:
    calls = [run_in_worker(running_loop(), lambda number=number: number) for number in range(200)]
    assert await asyncio.gather(*calls) == list(range(200))


def test_a_loop_that_was_closed_meanwhile_is_left_alone(gate: threading.Event) -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(TIME_LIMIT)
        ended.set()

    def submit(job: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=job))
        threads[-1].start()

    threads: list[threading.Thread] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(run_in_worker(loop, work, submit))
    loop.run_until_complete(wait_for_event(begun))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    gate.set()
    threads[0].join(TIME_LIMIT)
    assert ended.is_set()


# --- post ---


@pytest.mark.asyncio
async def test_what_is_posted_the_loop_calls_soon() -> None:
    called = list[threading.Thread]()
    call_threadsafe(running_loop(), lambda: called.append(threading.current_thread()))
    assert called == []
    await asyncio.sleep(0)
    assert called == [threading.current_thread()]


def test_what_is_posted_to_a_closed_loop_is_dropped() -> None:
    loop, called = asyncio.new_event_loop(), list[None]()
    loop.close()
    call_threadsafe(loop, lambda: called.append(None))
    assert called == []


# --- WorkerPool ---


class Crowd:
    """Jobs that hold their threads until the gate opens, and which threads they ran in."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self.threads: set[threading.Thread] = set()
        self.running = 0
        self.most = 0
        self.finished = 0

    def job(self) -> None:
        with self._lock:
            self.threads.add(threading.current_thread())
            self.running += 1
            self.most = max(self.most, self.running)
        self._gate.wait(TIME_LIMIT)
        with self._lock:
            self.running -= 1
            self.finished += 1


def test_no_more_threads_than_allowed(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(max_threads=3, idle_seconds=0.05), Crowd(gate)
    for _ in range(10):
        pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 3)
    time.sleep(0.02)
    assert crowd.most == 3
    gate.set()
    wait_until(lambda: crowd.finished == 10)
    assert len(crowd.threads) == 3
    assert crowd.most == 3


def test_jobs_that_block_do_not_wait_for_each_other(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(max_threads=8, idle_seconds=0.05), Crowd(gate)
    for _ in range(8):
        pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 8)


def test_one_thread_does_what_it_gets_on_with(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(idle_seconds=0.05, stall_seconds=TIME_LIMIT), Crowd(gate)
    pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 1)
    for _ in range(20):
        pool.submit(crowd.job)
    time.sleep(0.02)
    assert crowd.running == 1
    gate.set()
    wait_until(lambda: crowd.finished == 21)
    assert len(crowd.threads) == 1


def test_a_job_that_blocks_holds_others_back_for_a_moment_only(gate: threading.Event) -> None:
    """Once that is known, not even so long."""
    pool, crowd, done = (
        WorkerPool(idle_seconds=TIME_LIMIT, stall_seconds=0.2),
        Crowd(gate),
        list[float](),
    )
    pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 1)
    taken = pool._last_taken
    pool.submit(lambda: done.append(time.monotonic()))
    wait_until(lambda: bool(done))
    assert done[0] - taken >= 0.2
    wait_until(lambda: pool._idle == 1)
    pool._stall_seconds = 10 * TIME_LIMIT
    pool._last_taken -= 10 * TIME_LIMIT
    pool.submit(lambda: done.append(time.monotonic()))
    wait_until(lambda: len(done) == 2)
    assert crowd.running == 1


def test_threads_are_daemons(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(idle_seconds=0.05), Crowd(gate)
    pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 1)
    assert {thread.daemon for thread in crowd.threads} == {True}


def test_an_idle_thread_is_used_again(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(idle_seconds=TIME_LIMIT), Crowd(gate)
    gate.set()
    for count in range(1, 6):
        pool.submit(crowd.job)
        wait_until(lambda count=count: crowd.finished == count and pool._idle == 1)
    assert len(crowd.threads) == 1


def test_idle_threads_go_away_and_come_back(gate: threading.Event) -> None:
    pool, crowd = WorkerPool(idle_seconds=0.01), Crowd(gate)
    gate.set()
    for _ in range(3):
        pool.submit(crowd.job)
    wait_until(lambda: crowd.finished == 3)
    for thread in list(crowd.threads):
        thread.join(TIME_LIMIT)
        assert not thread.is_alive()
    pool.submit(crowd.job)
    wait_until(lambda: crowd.finished == 4)


def test_no_job_is_lost_while_threads_come_and_go() -> None:
    pool = WorkerPool(max_threads=4, idle_seconds=0.0005)
    done: list[int] = []
    for number in range(500):
        pool.submit(lambda number=number: done.append(number))
        if number % 10 == 0:
            time.sleep(0.0006)
    wait_until(lambda: len(done) == 500)
    assert sorted(done) == list(range(500))


def test_a_thread_that_a_ctrl_c_kept_from_starting_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool()
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


def test_an_idle_thread_holds_no_job() -> None:
    class Job:
        def __call__(self) -> None:
            pass

    pool, job = WorkerPool(idle_seconds=2 * TIME_LIMIT), Job()
    gone = weakref.ref(job)
    pool.submit(job)
    del job
    wait_until(lambda: gone() is None)


def test_a_job_that_hangs_keeps_no_interpreter_from_exiting() -> None:
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
def test_a_job_submitted_as_the_interpreter_exits_does_not_keep_it(submit: str) -> None:
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


def no_more_threads(*args: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_job_that_no_thread_can_be_had_for_runs_in_its_submitters(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    pool, crowd = WorkerPool(max_threads=1, idle_seconds=0.05), Crowd(gate)
    gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        for count in (1, 2, 3):
            pool.submit(crowd.job)
            assert crowd.finished == count
    assert crowd.threads == {threading.current_thread()}
    pool.submit(crowd.job)
    wait_until(lambda: crowd.finished == 4)
    assert len(crowd.threads) == 2
    wait_until(lambda: pool._threads == 0)


def test_jobs_left_to_a_thread_that_cannot_be_had_either_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, done = WorkerPool(), list[str]()

    def start(thread: threading.Thread) -> None:
        if not done:  # a second job comes in while the first one's thread is still being started
            done.append("began")
            pool.submit(lambda: done.append("second"))
            assert done == ["began"]
        no_more_threads()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        pool.submit(lambda: done.append("first"))
    assert done == ["began", "first", "second"]
    assert pool._threads == 0


def test_a_job_is_left_to_the_threads_there_are(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    pool, crowd = WorkerPool(max_threads=2, idle_seconds=0.05), Crowd(gate)
    pool.submit(crowd.job)
    wait_until(lambda: crowd.running == 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        pool.submit(crowd.job)
    assert crowd.running == 1
    gate.set()
    wait_until(lambda: crowd.finished == 2)
    assert len(crowd.threads) == 1
    wait_until(lambda: pool._threads == 0)


@pytest.mark.asyncio
async def test_a_call_that_no_thread_can_be_had_for_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        made_in = await run_in_worker(running_loop(), threading.current_thread, pool.submit)
        assert made_in is threading.current_thread()
    assert await run_in_worker(running_loop(), lambda: 42, pool.submit) == 42


# --- make_in_worker ---


class Workshop:
    """Makes one thing, as slowly as it is told, and takes back what nobody wants."""

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
async def test_what_is_made_is_handed_over(gate: threading.Event) -> None:
    shop = Workshop(gate)
    gate.set()
    thing = await make_in_worker(running_loop(), shop.make, shop.discard, shop.submit)
    assert shop.made == [thing]
    assert shop.finished.wait(TIME_LIMIT)
    assert shop.discarded == []


@pytest.mark.asyncio
async def test_nothing_is_made_for_one_who_cancelled_before(gate: threading.Event) -> None:
    shop, jobs = Workshop(gate), list[Callable[[], None]]()
    gate.set()
    task = asyncio.create_task(make_in_worker(running_loop(), shop.make, shop.discard, jobs.append))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (job,) = jobs
    job()
    assert (shop.made, shop.discarded) == ([], [])


@pytest.mark.asyncio
async def test_what_is_made_after_cancelling_is_discarded_where_it_was_made(
    gate: threading.Event,
) -> None:
    shop = Workshop(gate)
    task = asyncio.create_task(make_in_worker(running_loop(), shop.make, shop.discard, shop.submit))
    await wait_for_event(shop.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shop.discarded == []
    gate.set()
    assert shop.finished.wait(TIME_LIMIT)
    assert len(shop.made) == 1
    assert shop.discarded == shop.made
    assert shop.discarded_in == ["aiordma-worker"]


@pytest.mark.asyncio
async def test_what_was_made_before_cancelling_is_discarded_too(gate: threading.Event) -> None:
    shop = Workshop(gate)
    task = asyncio.create_task(make_in_worker(running_loop(), shop.make, shop.discard, shop.submit))
    await wait_for_event(shop.begun)
    gate.set()
    assert shop.finished.wait(TIME_LIMIT)  # the loop stands still, so the task knows nothing of it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: bool(shop.discarded))
    await asyncio.sleep(0.02)
    assert shop.discarded == shop.made
    assert shop.discarded_in == ["aiordma-worker"]


@pytest.mark.asyncio
async def test_whenever_one_cancels_what_is_made_is_discarded_once() -> None:
    for _ in range(200):
        made, discarded, done = list[int](), list[int](), threading.Event()

        def make(made: list[int] = made) -> int:
            made.append(1)
            return 1

        def submit(job: Callable[[], None], done: threading.Event = done) -> None:
            worker_pool.submit(lambda: (job(), done.set()))

        task = asyncio.create_task(make_in_worker(running_loop(), make, discarded.append, submit))
        await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert done.wait(TIME_LIMIT)
        if isinstance(result, asyncio.CancelledError):
            wait_until(lambda made=made, discarded=discarded: len(discarded) == len(made))
        else:
            assert (result, made, discarded) == (1, [1], [])


@pytest.mark.asyncio
async def test_an_error_of_the_maker_passes(gate: threading.Event) -> None:
    shop = Workshop(gate)

    def fail() -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await make_in_worker(running_loop(), fail, shop.discard, shop.submit)
    assert shop.finished.wait(TIME_LIMIT)
    assert shop.discarded == []


@pytest.mark.asyncio
async def test_an_error_of_the_maker_after_cancelling_discards_nothing(
    gate: threading.Event,
) -> None:
    shop = Workshop(gate)

    def fail() -> object:
        shop.make()
        raise ValueError("no")

    task = asyncio.create_task(make_in_worker(running_loop(), fail, shop.discard, shop.submit))
    await wait_for_event(shop.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert shop.finished.wait(TIME_LIMIT)
    assert shop.discarded == []


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
        jobs.submit(lambda number=number: job(number), pools[number % 3])
    wait_until(lambda: len(order) == 100)
    assert order == list(range(100))


def test_serial_jobs_go_to_the_pool_that_was_named(gate: threading.Event) -> None:
    jobs, first, second = SerialJobs(), Crowd(gate), Crowd(gate)
    gate.set()
    one, two = WorkerPool(idle_seconds=TIME_LIMIT), WorkerPool(idle_seconds=TIME_LIMIT)
    for _ in range(3):
        jobs.submit(first.job, one)
        jobs.submit(second.job, two)
    wait_until(lambda: first.finished == second.finished == 3)
    assert first.threads.isdisjoint(second.threads)


def test_no_thread_waits_for_its_turn(gate: threading.Event) -> None:
    pool, jobs, crowd = WorkerPool(max_threads=2, idle_seconds=0.05), SerialJobs(), Crowd(gate)
    for _ in range(5):
        jobs.submit(crowd.job, pool)
    wait_until(lambda: crowd.running == 1)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(TIME_LIMIT)
    assert crowd.running == 1


def test_two_series_do_not_wait_for_each_other(gate: threading.Event) -> None:
    blocked, crowd = SerialJobs(), Crowd(gate)
    blocked.submit(crowd.job)
    wait_until(lambda: crowd.running == 1)
    done = threading.Event()
    SerialJobs().submit(done.set)
    assert done.wait(TIME_LIMIT)


def test_a_series_that_ran_empty_starts_again() -> None:
    jobs = SerialJobs()
    for _ in range(50):
        done = threading.Event()
        jobs.submit(done.set)
        assert done.wait(TIME_LIMIT)


def test_a_job_may_submit_the_next() -> None:
    jobs, order, done = SerialJobs(), list[str](), threading.Event()

    def first() -> None:
        jobs.submit(lambda: (order.append("last"), done.set()))
        order.append("first")

    jobs.submit(first)
    assert done.wait(TIME_LIMIT)
    assert order == ["first", "last"]


class Threadless(WorkerPool):
    """A pool for which the system has no thread: its jobs block who submits them."""

    def submit(self, job: Callable[[], None]) -> None:
        job()


def test_a_series_that_no_thread_can_be_had_for_runs_in_its_submitters() -> None:
    jobs, order = SerialJobs(), list[str]()

    def first() -> None:
        jobs.submit(lambda: order.append("last"), Threadless())
        order.append("first")

    jobs.submit(first, Threadless())
    assert order == ["first", "last"]
    done = threading.Event()
    jobs.submit(done.set)
    assert done.wait(TIME_LIMIT)


def test_jobs_that_no_thread_can_be_had_for_later_run_where_the_one_before_did(
    gate: threading.Event,
) -> None:
    jobs, crowd, done = SerialJobs(), Crowd(gate), threading.Event()
    jobs.submit(crowd.job, WorkerPool(idle_seconds=TIME_LIMIT))
    jobs.submit(crowd.job, Threadless())
    jobs.submit(crowd.job, Threadless())
    jobs.submit(done.set)
    gate.set()
    assert done.wait(TIME_LIMIT)
    assert crowd.finished == 3
    assert (crowd.most, len(crowd.threads)) == (1, 1)
