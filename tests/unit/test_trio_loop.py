"""TrioLoop: it has the methods that the core needs, and leaves nothing behind after a run."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
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
    FairSemaphore,
    LoopTimeBudget,
    WaitQueue,
    cancellation_of,
    checkpoint,
    checkpoint_of,
    ensure_called,
    running_loop,
    task_group,
)
from aiordma.loop.trio_loop import TrioFuture, TrioLoop

pytestmark = pytest.mark.usefixtures("time_limit")


def on_trio(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test on trio, and assert that all system tasks of aiordma have ended after it."""

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


# --- running_loop ---


@on_trio
async def test_a_run_has_one_loop() -> None:
    assert loop() is loop()


def test_another_run_has_another_loop() -> None:
    seen = []

    async def note() -> None:
        seen.append(loop())

    trio.run(note)
    trio.run(note)
    assert seen[0] is not seen[1]


def test_on_asyncio_the_asyncio_loop_is_found_although_trio_is_imported() -> None:
    async def note() -> object:
        return running_loop() is asyncio.get_running_loop()

    assert asyncio.run(note())


def test_running_loop_outside_of_any_loop_raises() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        running_loop()


def test_trio_as_a_guest_of_asyncio() -> None:
    """Both run in one thread then. Each task belongs to one of the two loops."""

    async def host() -> tuple[object, object]:
        host_loop = asyncio.get_running_loop()
        done = host_loop.create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=host_loop.call_soon_threadsafe,
            done_callback=done.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        assert running_loop() is host_loop
        return (await done).unwrap(), running_loop() is host_loop

    async def guest() -> object:
        await checkpoint()
        return isinstance(running_loop(), TrioLoop)

    assert asyncio.run(host()) == (True, True)


# --- futures ---


async def wait_for(future: TrioFuture) -> None:
    await future


@on_trio
async def test_awaiting_a_set_future_is_a_checkpoint() -> None:
    future = loop().create_future()
    future.set_result(None)
    with assert_checkpoints():
        await future


@on_trio
async def test_a_future_whose_waiter_was_cancelled_is_done() -> None:
    future = loop().create_future()
    with trio.move_on_after(0) as scope:
        await future
    assert scope.cancelled_caught
    assert future.done()
    future.set_result(None)  # has no effect


@on_trio
async def test_a_wake_up_before_the_cancellation_has_priority() -> None:
    """trio does not cancel a task that was woken already. So the task gets the unit."""
    semaphore = FairSemaphore(loop(), 0)
    acquired = []

    async def acquire() -> None:
        await semaphore.acquire()
        acquired.append("a unit")

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(acquire)
            await wait_all_tasks_blocked()
            semaphore.release()
            scope.cancel()
    assert (acquired, semaphore.free) == (["a unit"], 0)


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
    """Not even if the descriptor is readable and the task of the reader is about to run."""
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
async def test_a_descriptor_can_be_closed_right_after_remove_reader() -> None:
    """The test closes it before the task has begun, while it waits, and in the callback."""
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
async def test_the_number_of_a_closed_descriptor_can_be_used_again() -> None:
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
async def test_a_failing_callback_is_logged_and_its_reader_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
async def test_a_reader_that_is_always_readable_starves_no_task() -> None:
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
async def test_call_soon_calls_in_the_next_iteration() -> None:
    called = trio.Event()
    loop().call_soon(called.set)
    assert not called.is_set()
    await called.wait()


@on_trio
async def test_yield_to_loop_is_a_checkpoint() -> None:
    budget = LoopTimeBudget(loop(), fast_path.CompletionDispatcher(lambda: None))
    with assert_checkpoints():
        await budget.yield_to_loop()


# --- the end of a run ---


def test_the_loop_is_closed_after_the_run_and_not_referenced() -> None:
    async def main() -> TrioLoop:
        running = loop()
        assert not running.is_closed()
        return running

    closed_loop = trio.run(main)
    assert closed_loop.is_closed()
    with pytest.raises(RuntimeError):
        closed_loop.call_soon_threadsafe(lambda: None)
    closed_loop.remove_reader(0)
    reference = weakref.ref(closed_loop)
    del closed_loop
    gc.collect()
    assert reference() is None


def test_ensure_called_calls_after_the_end_of_the_run() -> None:
    called = threading.Event()

    async def main() -> TrioLoop:
        return loop()

    ensure_called(trio.run(main), called.set)
    assert called.is_set()


def test_remaining_readers_and_timers_end_with_the_run() -> None:
    async def main() -> None:
        loop().add_reader(read_end, lambda: None)
        loop().call_later(3600, lambda: None)

    read_end, write_end = os.pipe()
    with closing(os.fdopen(read_end)), closing(os.fdopen(write_end)):
        trio.run(main)


# --- checkpoints and groups ---


@on_trio
async def test_checkpoints_on_trio() -> None:
    full_checkpoint, raise_if_cancelled = checkpoint_of(loop()), cancellation_of(loop())
    assert full_checkpoint is not None
    assert raise_if_cancelled is not None
    with assert_checkpoints():
        await full_checkpoint()
    with assert_checkpoints():
        await checkpoint()
    await raise_if_cancelled()
    for function in (full_checkpoint, raise_if_cancelled, checkpoint):
        with trio.CancelScope() as scope:
            scope.cancel()
            await function()
        assert scope.cancelled_caught


def test_asyncio_requires_no_checkpoints() -> None:
    async def main() -> None:
        assert checkpoint_of(running_loop()) is None
        assert cancellation_of(running_loop()) is None
        calls = []
        asyncio.get_running_loop().call_soon(lambda: calls.append(1))
        await checkpoint()
        assert not calls

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
            budget = LoopTimeBudget(running_loop(), fast_path.CompletionDispatcher(lambda: None))
            while len(queue) < 3:
                await budget.yield_to_loop()
            queue.wake_all()
        return sorted(done)

    assert run(main()) == [0, 1, 2]


def test_a_group_ends_with_the_first_failure(run: Callable[[Any], Any]) -> None:
    async def main() -> None:
        async def wait() -> None:
            await WaitQueue(running_loop()).wait()

        async def fail() -> None:
            raise ValueError("raised by a task")

        async with task_group(running_loop()) as tasks:
            tasks.create_task(wait())
            tasks.create_task(fail())

    with pytest.raises(ExceptionGroup) as group:
        run(main())
    assert [str(error) for error in group.value.exceptions] == ["raised by a task"]
