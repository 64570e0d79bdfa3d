"""One run of trio as a loop: what the core is promised, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import trio
import trio.lowlevel
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from aiordma._native import fast_path
from aiordma.loop import (
    Deadline,
    FairSemaphore,
    LoopTimeBudget,
    WaitQueue,
    cancellation_of,
    checkpoint,
    checkpoint_of,
    ensure_called,
    run_in_worker,
    running_loop,
    task_group,
)
from aiordma.loop.trio_loop import TrioFuture, TrioLoop

pytestmark = pytest.mark.usefixtures("time_limit")


def on_trio(test: Callable[..., Any]) -> Callable[..., None]:
    """A test whose body runs on trio; every system task that it began must have ended with it."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def body() -> None:
            before = system_tasks()
            await test(**fixtures)
            await wait_all_tasks_blocked()
            assert system_tasks() == before

        trio.run(body, strict_exception_groups=True)

    return run


def system_tasks() -> set[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return {
        task
        for nursery in root.child_nurseries
        for task in nursery.child_tasks
        if task.name.startswith("aiordma")
    }


@asynccontextmanager
async def pipe() -> AsyncIterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def loop() -> TrioLoop:
    running = running_loop()
    assert isinstance(running, TrioLoop)
    return running


# --- which loop ---


@on_trio
async def test_there_is_one_for_each_run() -> None:
    assert loop() is loop()


def test_another_run_has_another() -> None:
    seen = []

    async def note() -> None:
        seen.append(loop())

    trio.run(note)
    trio.run(note)
    assert seen[0] is not seen[1]


def test_asyncio_is_known_when_trio_is_imported() -> None:
    async def note() -> object:
        return running_loop() is asyncio.get_running_loop()

    assert asyncio.run(note())  # type: ignore[arg-type]


def test_outside_of_any_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        running_loop()


def test_trio_as_a_guest_of_asyncio() -> None:
    """Then both run in one thread; a task is of one or the other."""

    async def host() -> tuple[object, object]:
        mine = asyncio.get_running_loop()
        done = mine.create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=mine.call_soon_threadsafe,
            done_callback=done.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        assert running_loop() is mine
        return (await done).unwrap(), running_loop() is mine

    async def guest() -> object:
        await checkpoint()
        return isinstance(running_loop(), TrioLoop)

    assert asyncio.run(host()) == (True, True)


def test_aiordma_imports_no_trio() -> None:
    code = "import sys, aiordma; sys.exit('trio' in sys.modules or 'anyio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- futures ---


@on_trio
async def test_a_future_wakes_its_waiter() -> None:
    future = loop().create_future()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for, future)
        await wait_all_tasks_blocked()
        assert not future.done()
        future.set_result(None)
        assert future.done()


async def wait_for(future: TrioFuture) -> None:
    await future


@on_trio
async def test_one_that_is_set_already_is_a_checkpoint() -> None:
    future = loop().create_future()
    future.set_result(None)
    with assert_checkpoints():
        await future


@on_trio
async def test_one_whose_waiter_was_cancelled_is_done() -> None:
    future = loop().create_future()
    with trio.move_on_after(0) as scope:
        await future
    assert scope.cancelled_caught
    assert future.done()
    future.set_result(None)  # too late, and no harm


@on_trio
async def test_a_wake_up_that_came_first_is_not_taken_back() -> None:
    """trio cancels nobody who was woken already: what he was woken for is his."""
    slots = FairSemaphore(loop(), 0)
    got = []

    async def acquire() -> None:
        await slots.acquire()
        got.append("a slot")

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(acquire)
            await wait_all_tasks_blocked()
            slots.release()
            scope.cancel()
    assert (got, slots.free) == (["a slot"], 0)


# --- readers ---


@on_trio
async def test_a_reader_is_called_while_there_is_something_to_read() -> None:
    async with pipe() as (read_end, write_end):
        calls = []

        def read() -> None:
            calls.append(os.read(read_end, 1))

        loop().add_reader(read_end, read)
        os.write(write_end, b"abc")
        while len(calls) < 3:
            await trio.lowlevel.checkpoint()
        loop().remove_reader(read_end)
        os.write(write_end, b"d")
        await wait_all_tasks_blocked()
    assert calls == [b"a", b"b", b"c"]


@on_trio
async def test_a_reader_that_is_removed_is_not_called_again() -> None:
    """Also where the descriptor was found readable already, and its task is about to run."""
    async with pipe() as (read_end, write_end):
        calls: list[int] = []
        loop().add_reader(read_end, lambda: calls.append(1))
        await wait_all_tasks_blocked()
        os.write(write_end, b"x")

        async def remove() -> None:
            while not calls:
                await trio.lowlevel.checkpoint()
            loop().remove_reader(read_end)
            calls.clear()

        await remove()
        for _ in range(10):
            await trio.lowlevel.checkpoint()
    assert calls == []


@on_trio
async def test_the_descriptor_may_be_closed_at_once() -> None:
    """Before the task has begun, while it waits, and by the callback itself."""
    read_end, write_end = os.pipe()
    loop().add_reader(read_end, lambda: None)
    loop().remove_reader(read_end)
    os.close(read_end)
    os.close(write_end)
    await wait_all_tasks_blocked()

    read_end, write_end = os.pipe()
    loop().add_reader(read_end, lambda: None)
    await wait_all_tasks_blocked()
    loop().remove_reader(read_end)
    os.close(read_end)
    os.close(write_end)
    await wait_all_tasks_blocked()

    read_end, write_end = os.pipe()

    def close() -> None:
        loop().remove_reader(read_end)
        os.close(read_end)

    loop().add_reader(read_end, close)
    os.write(write_end, b"x")
    await wait_all_tasks_blocked()
    os.close(write_end)


@on_trio
async def test_the_number_of_a_closed_descriptor_may_be_used_again() -> None:
    calls: list[str] = []
    for name in ("first", "second"):
        async with pipe() as (read_end, write_end):

            def read(name: str = name, read_end: int = read_end) -> None:
                calls.append(name)
                os.read(read_end, 1)

            loop().add_reader(read_end, read)
            os.write(write_end, b"x")
            while name not in calls:
                await trio.lowlevel.checkpoint()
            loop().remove_reader(read_end)
    assert calls == ["first", "second"]


@on_trio
async def test_a_callback_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with pipe() as (read_end, write_end):
        calls = []

        def read() -> None:
            calls.append(os.read(read_end, 1))
            raise ValueError("in a callback")

        loop().add_reader(read_end, read)
        os.write(write_end, b"ab")
        while len(calls) < 2:
            await trio.lowlevel.checkpoint()
        loop().remove_reader(read_end)
    assert "in a callback" in caplog.text
    caplog.clear()


@on_trio
async def test_nobody_is_starved_by_a_reader_that_is_always_readable() -> None:
    async with pipe() as (read_end, write_end):
        calls: list[int] = []
        os.write(write_end, b"x")
        loop().add_reader(read_end, lambda: calls.append(1))
        with trio.fail_after(5):
            for _ in range(100):
                await trio.lowlevel.checkpoint()
        loop().remove_reader(read_end)
    assert 10 < len(calls) <= 100


# --- timers, threads ---


@on_trio
async def test_a_deadline_expires() -> None:
    woken = trio.Event()
    deadline = Deadline(loop(), 0.01, woken.set)
    await woken.wait()
    assert deadline.expired


@on_trio
async def test_a_deadline_that_is_cancelled_does_not() -> None:
    calls: list[int] = []
    deadlines = [Deadline(loop(), delay, lambda: calls.append(1)) for delay in (0.0, 0.01, 3600)]
    for deadline in deadlines:
        deadline.cancel()
    await trio.sleep(0.05)
    assert not calls
    assert not any(deadline.expired for deadline in deadlines)


@on_trio
async def test_a_call_in_the_next_turn() -> None:
    called = trio.Event()
    loop().call_soon(called.set)
    assert not called.is_set()
    await called.wait()


@on_trio
async def test_a_call_from_another_thread() -> None:
    called = trio.Event()
    mine = loop()
    await run_in_worker(mine, lambda: mine.call_soon_threadsafe(called.set))
    await called.wait()


@on_trio
async def test_the_result_of_a_worker_thread() -> None:
    with assert_checkpoints():
        assert await run_in_worker(loop(), threading.get_ident) != threading.get_ident()


@on_trio
async def test_a_worker_thread_is_not_waited_for_when_cancelled() -> None:
    go_on = threading.Event()
    with trio.move_on_after(0.05) as scope:
        await run_in_worker(loop(), go_on.wait)
    go_on.set()
    assert scope.cancelled_caught


@on_trio
async def test_polling_leaves_turns_to_others() -> None:
    turn = LoopTimeBudget(loop(), fast_path.CompletionDispatcher(lambda: None))
    with assert_checkpoints():
        await turn.yield_to_loop()


# --- the end of a run ---


def test_it_is_closed_after_the_run_and_is_not_kept() -> None:
    async def main() -> TrioLoop:
        mine = loop()
        assert not mine.is_closed()
        return mine

    mine = trio.run(main)
    assert mine.is_closed()
    with pytest.raises(RuntimeError):
        mine.call_soon_threadsafe(lambda: None)
    mine.remove_reader(0)
    kept = weakref.ref(mine)
    del mine
    gc.collect()
    assert kept() is None


def test_what_is_handed_over_is_called_whatever_becomes_of_the_run() -> None:
    called = threading.Event()

    async def main() -> TrioLoop:
        return loop()

    ensure_called(trio.run(main), called.set)
    assert called.is_set()


def test_readers_and_timers_that_are_left_end_with_the_run() -> None:
    async def main() -> None:
        loop().add_reader(read_end, lambda: None)
        loop().call_later(3600, lambda: None)

    read_end, write_end = os.pipe()
    with closing(os.fdopen(read_end)), closing(os.fdopen(write_end)):
        trio.run(main)


# --- checkpoints and groups ---


@on_trio
async def test_checkpoints() -> None:
    pause, if_cancelled = checkpoint_of(loop()), cancellation_of(loop())
    assert pause is not None
    assert if_cancelled is not None
    with assert_checkpoints():
        await pause()
    with assert_checkpoints():
        await checkpoint()
    await if_cancelled()
    for one in (pause, if_cancelled, checkpoint):
        with trio.CancelScope() as scope:
            scope.cancel()
            await one()
        assert scope.cancelled_caught


def test_asyncio_is_owed_none() -> None:
    async def main() -> None:
        assert checkpoint_of(running_loop()) is None
        assert cancellation_of(running_loop()) is None
        turns = []
        asyncio.get_running_loop().call_soon(lambda: turns.append(1))
        await checkpoint()
        assert not turns

    asyncio.run(main())


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return asyncio.run if request.param == "asyncio" else lambda coro: trio.run(_await, coro)


async def _await(coro: Any) -> Any:
    return await coro


def test_a_group_waits_for_its_tasks(run: Callable[[Any], Any]) -> None:
    async def main() -> list[int]:
        done: list[int] = []
        queue = WaitQueue(running_loop())

        async def work(number: int) -> None:
            await queue.wait()
            done.append(number)

        async with task_group(running_loop()) as tasks:
            for number in range(3):
                tasks.create_task(work(number))
            turn = LoopTimeBudget(running_loop(), fast_path.CompletionDispatcher(lambda: None))
            while len(queue) < 3:
                await turn.yield_to_loop()
            queue.wake_all()
        return sorted(done)

    assert run(main()) == [0, 1, 2]


def test_a_group_ends_with_the_first_failure(run: Callable[[Any], Any]) -> None:
    async def main() -> None:
        async def wait() -> None:
            await WaitQueue(running_loop()).wait()

        async def fail() -> None:
            raise ValueError("one of them")

        async with task_group(running_loop()) as tasks:
            tasks.create_task(wait())
            tasks.create_task(fail())

    with pytest.raises(ExceptionGroup) as group:
        run(main())
    assert [str(error) for error in group.value.exceptions] == ["one of them"]
