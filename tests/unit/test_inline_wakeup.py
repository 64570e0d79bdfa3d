"""Inline wake-ups: futures that resume their task at the end of the callback that sets them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from helpers import TIME_LIMIT

from aiordma.loop import make_future, run_with_inline_wakeups, running_loop, wake
from aiordma.loop.inline_wakeup import InlineFuture, after_batch

pytestmark = pytest.mark.asyncio

variable = contextvars.ContextVar("variable", default="outside")


class Waiters:
    """Tasks that each wait for a future, and a log of what happens to them."""

    def __init__(self, count: int, on_resume: Callable[[int], object]) -> None:
        made = [make_future(running_loop()) for _ in range(count)]
        self.futures = [future for future in made if isinstance(future, InlineFuture)]
        self.log: list[str] = []
        self.on_resume = on_resume
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
        self.on_resume(number)

    def wake(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number].set_result(None)
            self.log.append(f"woke {number}")

    async def called_inline(self, callback: Callable[[], object]) -> list[str]:
        """Let the loop call this with inline wake-ups. Return the log of that."""
        done, begin = asyncio.Event(), len(self.log)

        def call() -> None:
            try:
                run_with_inline_wakeups(callback)
            except End:
                self.log.append("raised")
            self.log.append("called")
            done.set()

        asyncio.get_running_loop().call_soon(call)
        await asyncio.wait_for(done.wait(), TIME_LIMIT)
        return self.log[begin:]


class End(BaseException):
    pass


async def waiters(count: int = 1, on_resume: Callable[[int], object] = lambda _: None) -> Waiters:
    made = Waiters(count, on_resume)
    await asyncio.sleep(0)
    return made


async def test_tasks_woken_by_a_callback_run_at_its_end() -> None:
    two = await waiters(2)
    log = await two.called_inline(lambda: two.wake(1, 0))
    assert log == ["woke 1", "woke 0", "1 in task 1", "0 in task 0", "called"]
    await two.tasks[0]
    await two.tasks[1]
    assert variable.get() == "outside"
    task = weakref.ref(two.tasks.pop())
    gc.collect()
    assert (task(), two.futures[0].done()) == (None, True)  # a future has no reference to its task


def is_done(futures: list[Any]) -> list[bool]:
    """Return for each future whether it is set. A callback gets any future that is."""
    return [future.done() and future.result() is None for future in futures]


async def test_the_methods_that_tasks_call() -> None:
    loop, context = running_loop(), contextvars.copy_context()
    seen: list[object] = []
    future: Any = InlineFuture(loop)
    assert (future.done(), future.cancelled(), future.get_loop()) == (False, False, loop)
    with pytest.raises(RuntimeError, match="is not done"):
        future.result()
    future.add_done_callback(seen.append, context=context)
    with pytest.raises(RuntimeError, match="another task"):
        future.add_done_callback(seen.append, context=context)
    assert [future.remove_done_callback(seen.append) for _ in range(2)] == [1, 0]
    future.add_done_callback(seen.append, context=context)
    future.set_result(None)
    assert (future.result(), future.done(), future.cancel(), seen) == (None, True, False, [])
    with pytest.raises(RuntimeError, match="done already"):
        future.set_result(None)
    await asyncio.sleep(0)
    future.add_done_callback(seen.append, context=context)  # it is done: called soon
    await asyncio.sleep(0)
    assert is_done(seen) == [True, True]
    for arguments in ((), ("why",)):
        cancelled = InlineFuture(loop)
        assert (cancelled.cancel(*arguments), cancelled.cancel()) == (True, False)
        assert (cancelled.cancelled(), cancelled.done()) == (True, True)
        with pytest.raises(asyncio.CancelledError) as raised:
            await cancelled
        assert raised.value.args == arguments
    wrong: list[Callable[[], object]] = [
        lambda: InlineFuture(),  # type: ignore[call-overload]
        lambda: InlineFuture(loop, seen.append),  # type: ignore[call-overload]
        lambda: future.cancel(1, 2),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()


async def test_a_future_made_with_a_callback_calls_it_once() -> None:
    seen: list[object] = []
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future = InlineFuture(loop, seen.append, context)

    def wake_twice() -> None:
        wake(future)
        wake(future)

    run_with_inline_wakeups(wake_twice)
    assert is_done(seen) == [True]
    future = InlineFuture(loop, seen.append, context)
    wake(future)
    assert len(seen) == 1
    await asyncio.sleep(0)
    assert is_done(seen) == [True, True]


async def test_a_task_woken_on_uvloop_runs_at_the_end_of_the_callback() -> None:
    async def body() -> list[str]:
        one = await waiters()
        return await one.called_inline(lambda: one.wake(0))

    assert await asyncio.to_thread(uvloop.run, body()) == ["woke 0", "0 in task 0", "called"]


async def test_a_task_woken_by_a_task_runs_in_the_next_iteration() -> None:
    """Another task cannot run inside a task."""
    three = await waiters(3, lambda number: three.wake(*[2] * (number == 1)))
    three.wake(0)
    assert three.log == ["woke 0"]
    await asyncio.sleep(0)
    assert three.log == ["woke 0", "0 in task 0"]
    log = await three.called_inline(lambda: three.wake(1))
    assert log == ["woke 1", "1 in task 1", "woke 2", "called", "2 in task 2"]


async def test_a_nested_call_wakes_at_the_end_of_the_outer_one() -> None:
    one = await waiters()

    def outer() -> None:
        run_with_inline_wakeups(lambda: one.wake(0))
        one.log.append("inner ended")

    log = await one.called_inline(outer)
    assert log == ["woke 0", "inner ended", "0 in task 0", "called"]


async def test_a_cancelled_task_is_cancelled_once() -> None:
    three = await waiters(3, lambda number: number == 1 and three.tasks[2].cancel())
    three.tasks[0].cancel()
    assert three.futures[0].done()
    with pytest.raises(asyncio.CancelledError):
        await three.tasks[0]
    await three.called_inline(lambda: three.wake(1, 2))  # the first of the batch cancels the other
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(three.tasks[2], TIME_LIMIT)
    assert sorted(three.log) == [
        "0 cancelled", "1 in task 1", "2 cancelled", "called", "woke 1", "woke 2",
    ]  # fmt: skip


async def test_after_a_base_exception_the_loop_runs_the_other_tasks() -> None:
    def end(_: object) -> None:
        raise End

    three = await waiters(3)
    first: Any = make_future(running_loop())
    first.add_done_callback(end, context=contextvars.copy_context())

    def wake_all() -> None:
        three.wake(0)
        first.set_result(None)
        three.wake(1, 2)

    await three.called_inline(wake_all)
    await asyncio.wait_for(three.tasks[2], TIME_LIMIT)
    assert three.log[3:] == ["0 in task 0", "raised", "called", "1 in task 1", "2 in task 2"]


async def test_after_batch_calls_after_all_tasks_of_a_batch_of_several() -> None:
    accepted: list[bool] = []

    def call_later(number: int) -> None:
        if number in (0, 3):
            accepted.append(after_batch(lambda: four.log.append("after the batch")))

    four = await waiters(4, call_later)
    assert not after_batch(lambda: four.log.append("never: no task was woken"))
    log = await four.called_inline(lambda: four.wake(0, 1, 2))
    assert log[3:] == ["0 in task 0", "1 in task 1", "2 in task 2", "after the batch", "called"]
    assert await four.called_inline(lambda: four.wake(3)) == ["woke 3", "3 in task 3", "called"]
    assert accepted == [True, False]
