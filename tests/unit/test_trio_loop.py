"""TrioLoop: it has the methods that the core needs, and leaves nothing behind after a run."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import trio
from simulator import Simulation
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from aiordma._native import fast_path
from aiordma.loop import FairSemaphore, LoopTimeBudget, ensure_called, running_loop
from aiordma.loop.checkpoints import cancellation_of, checkpoint, checkpoint_of
from aiordma.loop.trio_loop import TrioLoop

pytestmark = [pytest.mark.usefixtures("time_limit"), pytest.mark.loops("trio")]


def loop() -> TrioLoop:
    running = running_loop()
    assert isinstance(running, TrioLoop)
    return running


def test_each_run_has_one_loop() -> None:
    async def loops() -> list[TrioLoop]:
        return [loop(), loop()]

    first, second = trio.run(loops), trio.run(loops)
    assert first[0] is first[1] is not second[0]
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


async def test_a_future_is_a_checkpoint_and_cancelling_sets_it(simulation: Simulation) -> None:
    future = loop().create_future()
    future.set_result(None)
    with assert_checkpoints():
        await future
    future = loop().create_future()
    with trio.move_on_after(0) as scope:
        await future
    assert scope.cancelled_caught
    assert future.done()
    future.set_result(None)  # has no effect


async def test_a_wake_up_before_the_cancellation_has_priority(simulation: Simulation) -> None:
    """trio does not cancel a task that was woken already. So the task gets the unit."""
    semaphore, acquired = FairSemaphore(loop(), 0), []

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


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


async def test_a_reader_is_called_while_there_is_something_to_read(
    simulation: Simulation, pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the callback is logged, and the reader stays."""
    calls = []

    def read() -> None:
        calls.append(os.read(pipe[0], 1))
        raise ValueError("in a callback")

    loop().add_reader(pipe[0], read)
    os.write(pipe[1], b"abc")
    while len(calls) < 3:
        await trio.lowlevel.checkpoint()
    loop().remove_reader(pipe[0])
    os.write(pipe[1], b"d")
    await wait_all_tasks_blocked()
    assert calls == [b"a", b"b", b"c"]
    assert "in a callback" in caplog.text


async def test_a_reader_starves_no_task_and_is_not_called_after_its_removal(
    simulation: Simulation, pipe: tuple[int, int]
) -> None:
    """Not even if the descriptor is readable and the task of the reader is about to run."""
    calls: list[int] = []
    loop().add_reader(pipe[0], lambda: calls.append(1))
    await wait_all_tasks_blocked()
    os.write(pipe[1], b"x")
    for _ in range(100):
        await trio.lowlevel.checkpoint()
    assert 10 < len(calls) <= 100
    loop().remove_reader(pipe[0])
    calls.clear()
    for _ in range(10):
        await trio.lowlevel.checkpoint()
    assert calls == []


async def test_a_descriptor_can_be_closed_right_after_remove_reader(simulation: Simulation) -> None:
    """Before its task has begun, while it waits, and in the callback. Its number is used again."""
    calls, root = [], trio.lowlevel.current_root_task()
    assert root is not None
    before = [len(nursery.child_tasks) for nursery in root.child_nurseries]
    for moment in ("before", "waiting", "callback"):
        read_end, write_end = os.pipe()

        def close(read_end: int = read_end) -> None:
            loop().remove_reader(read_end)
            os.close(read_end)
            calls.append(read_end)

        loop().add_reader(read_end, close)
        if moment != "before":
            await wait_all_tasks_blocked()
        if moment == "callback":
            os.write(write_end, b"x")
        else:
            close()
        await wait_all_tasks_blocked()
        os.close(write_end)
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert [len(nursery.child_tasks) for nursery in root.child_nurseries] == before


def test_the_loop_is_closed_after_the_run_and_not_referenced(pipe: tuple[int, int]) -> None:
    """Readers and timers that remain end with it."""

    async def main() -> TrioLoop:
        loop().add_reader(pipe[0], pytest.fail)
        loop().call_later(3600, pytest.fail)
        assert not loop().is_closed()
        return loop()

    closed_loop, called = trio.run(main), list[None]()
    assert closed_loop.is_closed()
    with pytest.raises(RuntimeError):
        closed_loop.call_soon_threadsafe(pytest.fail)
    ensure_called(closed_loop, lambda: called.append(None))
    assert called
    closed_loop.remove_reader(pipe[0])
    reference = weakref.ref(closed_loop)
    del closed_loop
    gc.collect()
    assert reference() is None


def test_the_loop_is_closed_as_soon_as_trio_takes_no_more_calls() -> None:
    """trio calls its instruments a little later."""
    loops: list[TrioLoop] = []
    seen: list[bool] = []

    class Late(trio.abc.Instrument):
        def after_run(self) -> None:
            ensure_called(loops[0], lambda: seen.append(loops[0].is_closed()))

    async def main() -> None:
        loops.append(loop())

    trio.run(main, instruments=[Late()])
    assert seen == [True]


async def test_checkpoints_on_trio(simulation: Simulation) -> None:
    full_checkpoint, raise_if_cancelled = checkpoint_of(TrioLoop), cancellation_of(TrioLoop)
    assert full_checkpoint is not None
    assert raise_if_cancelled is not None
    budget = LoopTimeBudget(loop(), fast_path.CompletionDispatcher(lambda: None))
    for function in (full_checkpoint, checkpoint, budget.yield_to_loop):
        with assert_checkpoints():
            await function()
    await raise_if_cancelled()
    for function in (full_checkpoint, checkpoint, raise_if_cancelled):
        with trio.CancelScope() as scope:
            scope.cancel()
            await function()
        assert scope.cancelled_caught
