"""Inline wake-ups: futures that resume their task at the end of the callback that sets them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable

import pytest
import uvloop
from helpers import TIME_LIMIT

from aiordma.loop import make_future, run_with_inline_wakeups, running_loop
from aiordma.loop.inline_wakeup import InlineFuture, after_batch

pytestmark = pytest.mark.asyncio

variable = contextvars.ContextVar("variable", default="outside")


def make() -> InlineFuture:
    future = make_future(running_loop())
    assert isinstance(future, InlineFuture)
    return future


class Waiters:
    """Tasks that each wait for a future, and a log of what happens to them."""

    def __init__(self, count: int = 1) -> None:
        self.futures = [make() for _ in range(count)]
        self.log: list[str] = []
        self.tasks = [asyncio.create_task(self._wait(number)) for number in range(count)]

    async def _wait(self, number: int) -> None:
        variable.set(f"task {number}")
        try:
            await self.futures[number]
        except asyncio.CancelledError:
            self.log.append(f"{number} cancelled")
            raise
        assert asyncio.current_task() is self.tasks[number]
        self.log.append(f"{number} in {variable.get()}")


async def waiters(count: int = 1) -> Waiters:
    made = Waiters(count)
    await asyncio.sleep(0)
    return made


async def called_by_the_loop(callback: Callable[[], object]) -> None:
    done = asyncio.Event()

    def call() -> None:
        try:
            callback()
        finally:
            done.set()

    asyncio.get_running_loop().call_soon(call)
    await asyncio.wait_for(done.wait(), TIME_LIMIT)


async def test_tasks_woken_by_a_callback_run_at_its_end() -> None:
    two = await waiters(2)

    def wake_both() -> None:
        wake(two, 1)
        wake(two, 0)

    def call() -> None:
        run_with_inline_wakeups(wake_both)
        two.log.append("called")

    await called_by_the_loop(call)
    assert two.log == ["woke 1", "woke 0", "1 in task 1", "0 in task 0", "called"]
    await asyncio.gather(*two.tasks)
    assert variable.get() == "outside"


def wake(waiting: Waiters, number: int) -> None:
    waiting.futures[number].set_result(None)
    waiting.log.append(f"woke {number}")


async def test_a_task_woken_on_uvloop_runs_at_the_end_of_the_callback() -> None:
    async def body() -> list[str]:
        one = await waiters()
        await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
        return one.log

    log = await asyncio.to_thread(uvloop.run, body())
    assert log == ["woke 0", "0 in task 0"]


async def test_a_task_woken_by_a_task_runs_in_the_next_iteration() -> None:
    one = await waiters()
    wake(one, 0)  # in a task: another task cannot run inside it
    assert one.log == ["woke 0"]
    await asyncio.sleep(0)
    assert one.log == ["woke 0", "0 in task 0"]


async def test_a_task_woken_by_an_inline_task_runs_in_the_next_iteration() -> None:
    one, other = make(), await waiters()

    async def wait() -> None:
        await one
        wake(other, 0)
        other.log.append("continues")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: one.set_result(None)))
    await asyncio.gather(waiting, *other.tasks)
    assert other.log == ["woke 0", "continues", "0 in task 0"]


async def test_a_nested_call_wakes_at_the_end_of_the_outer_one() -> None:
    one = await waiters()

    def outer() -> None:
        run_with_inline_wakeups(lambda: wake(one, 0))
        one.log.append("inner ended")

    await called_by_the_loop(lambda: run_with_inline_wakeups(outer))
    assert one.log == ["woke 0", "inner ended", "0 in task 0"]


async def test_a_cancelled_task_is_cancelled_once() -> None:
    one = await waiters()
    one.tasks[0].cancel()
    assert one.futures[0].done()
    with pytest.raises(asyncio.CancelledError):
        await one.tasks[0]
    assert one.log == ["0 cancelled"]


async def test_a_task_cancelled_by_another_task_of_its_batch_is_cancelled() -> None:
    two = await waiters(2)
    first = make()

    async def cancel() -> None:
        await first
        two.tasks[0].cancel()

    cancelling = asyncio.create_task(cancel())
    await asyncio.sleep(0)

    def call() -> None:
        first.set_result(None)
        wake(two, 0)

    await called_by_the_loop(lambda: run_with_inline_wakeups(call))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(two.tasks[0], TIME_LIMIT)
    assert two.log == ["woke 0", "0 cancelled"]
    wake(two, 1)
    await asyncio.gather(cancelling, two.tasks[1])


async def test_other_callbacks_of_a_future_are_called_too() -> None:
    one = await waiters()
    calls: list[str] = []
    callback: Callable[[object], None] = lambda _: calls.append("called")  # noqa: E731
    one.futures[0].add_done_callback(callback)
    removed: Callable[[object], None] = lambda _: calls.append("never")  # noqa: E731
    one.futures[0].add_done_callback(removed)
    assert one.futures[0].remove_done_callback(removed) == 1
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
    await asyncio.sleep(0)
    assert calls == ["called"]
    assert one.log == ["woke 0", "0 in task 0"]


async def test_a_failing_callback_still_runs_the_tasks_it_woke() -> None:
    one = await waiters()

    def fail() -> None:
        wake(one, 0)
        raise ZeroDivisionError

    def call() -> None:
        with pytest.raises(ZeroDivisionError):
            run_with_inline_wakeups(fail)

    await called_by_the_loop(call)
    assert one.log == ["woke 0", "0 in task 0"]
    await one.tasks[0]


async def test_after_a_base_exception_the_loop_runs_the_other_tasks() -> None:
    class End(BaseException):
        pass

    two = await waiters(2)
    first = make()

    def end(_: object) -> None:
        raise End

    first.add_done_callback(end, context=contextvars.copy_context())

    def wake_all() -> None:
        wake(two, 0)
        first.set_result(None)
        wake(two, 1)

    def call() -> None:
        with pytest.raises(End):
            run_with_inline_wakeups(wake_all)
        two.log.append("raised")

    await called_by_the_loop(call)
    await asyncio.wait_for(two.tasks[1], TIME_LIMIT)
    assert two.log == ["woke 0", "woke 1", "0 in task 0", "raised", "1 in task 1"]


async def test_a_future_keeps_no_reference_to_a_resumed_task() -> None:
    one = await waiters()
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
    await one.tasks[0]
    task = weakref.ref(one.tasks.pop())
    gc.collect()
    assert task() is None
    assert one.futures[0].done()


async def test_after_batch_calls_after_all_tasks_of_the_batch() -> None:
    three = await waiters(3)
    assert not after_batch(lambda: three.log.append("never: no task was woken"))

    async def wait(future: InlineFuture) -> None:
        await future
        assert after_batch(lambda: three.log.append("after the batch"))

    first = make()
    waiting = asyncio.create_task(wait(first))
    await asyncio.sleep(0)

    def wake_all() -> None:
        first.set_result(None)
        for number in range(3):
            wake(three, number)

    def call() -> None:
        run_with_inline_wakeups(wake_all)
        three.log.append("called")

    await called_by_the_loop(call)
    in_batch = ["0 in task 0", "1 in task 1", "2 in task 2"]
    assert three.log[3:] == [*in_batch, "after the batch", "called"]
    await waiting


async def test_after_batch_refuses_in_a_batch_of_one() -> None:
    results: list[bool] = []

    async def wait(future: InlineFuture) -> None:
        await future
        results.append(after_batch(lambda: None))

    first = make()
    waiting = asyncio.create_task(wait(first))
    await asyncio.sleep(0)
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: first.set_result(None)))
    await waiting
    assert results == [False]
