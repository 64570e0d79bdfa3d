"""Futures that wake their task in the callback that brings the news."""

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
    """Tasks that each wait for a future, and note what happens."""

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


async def test_whom_a_callback_wakes_goes_on_at_its_end() -> None:
    two = await waiters(2)

    def call() -> None:
        run_with_inline_wakeups(lambda: [wake(two, number) for number in (1, 0)])
        two.log.append("called")

    await called_by_the_loop(call)
    assert two.log == ["woke 1", "woke 0", "1 in task 1", "0 in task 0", "called"]
    await asyncio.gather(*two.tasks)
    assert variable.get() == "outside"


def wake(waiting: Waiters, number: int) -> None:
    waiting.futures[number].set_result(None)
    waiting.log.append(f"woke {number}")


async def test_on_uvloop_too() -> None:
    async def body() -> list[str]:
        one = await waiters()
        await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
        return one.log

    log = await asyncio.to_thread(uvloop.run, body())
    assert log == ["woke 0", "0 in task 0"]


async def test_without_such_a_callback_the_loop_does_it() -> None:
    one = await waiters()
    wake(one, 0)  # by a task: two cannot run at once
    assert one.log == ["woke 0"]
    await asyncio.sleep(0)
    assert one.log == ["woke 0", "0 in task 0"]


async def test_what_a_woken_task_wakes_waits_for_the_loop() -> None:
    one, other = make(), await waiters()

    async def wait() -> None:
        await one
        wake(other, 0)
        other.log.append("goes on")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: one.set_result(None)))
    await asyncio.gather(waiting, *other.tasks)
    assert other.log == ["woke 0", "goes on", "0 in task 0"]


async def test_one_within_another_is_one() -> None:
    one = await waiters()

    def outer() -> None:
        run_with_inline_wakeups(lambda: wake(one, 0))
        one.log.append("inner ended")

    await called_by_the_loop(lambda: run_with_inline_wakeups(outer))
    assert one.log == ["woke 0", "inner ended", "0 in task 0"]


async def test_one_that_was_set_before_is_not_waited_for() -> None:
    future = make()
    run_with_inline_wakeups(lambda: future.set_result(None))
    await asyncio.wait_for(future, TIME_LIMIT)
    assert future.done()


async def test_a_cancelled_task_hears_of_it_once() -> None:
    one = await waiters()
    one.tasks[0].cancel()
    assert one.futures[0].done()
    with pytest.raises(asyncio.CancelledError):
        await one.tasks[0]
    assert one.log == ["0 cancelled"]


async def test_a_task_that_is_cancelled_by_one_that_was_woken_with_it() -> None:
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


async def test_others_may_be_told_too() -> None:
    one = await waiters()
    told: list[str] = []
    note: Callable[[object], None] = lambda _: told.append("told")  # noqa: E731
    one.futures[0].add_done_callback(note)
    dropped: Callable[[object], None] = lambda _: told.append("never")  # noqa: E731
    one.futures[0].add_done_callback(dropped)
    assert one.futures[0].remove_done_callback(dropped) == 1
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
    await asyncio.sleep(0)
    assert told == ["told"]
    assert one.log == ["woke 0", "0 in task 0"]


async def test_with_a_timeout_and_in_a_group() -> None:
    one = make()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await one
    done, pending = await asyncio.wait([make()], timeout=0.01)
    assert (len(done), len(pending)) == (0, 1)


async def test_a_callback_that_fails_wakes_whom_it_has_woken() -> None:
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


async def test_what_ends_the_loop_leaves_the_others_to_it() -> None:
    class End(BaseException):
        pass

    two = await waiters(2)
    first = make()

    def end(_: object) -> None:
        raise End

    first.add_done_callback(end, context=contextvars.copy_context())

    def call() -> None:
        with pytest.raises(End):
            run_with_inline_wakeups(lambda: (wake(two, 0), first.set_result(None), wake(two, 1)))
        two.log.append("over")

    await called_by_the_loop(call)
    await asyncio.wait_for(two.tasks[1], TIME_LIMIT)
    assert two.log == ["woke 0", "woke 1", "0 in task 0", "over", "1 in task 1"]


async def test_nothing_is_kept_of_a_task_that_went_on() -> None:
    one = await waiters()
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake(one, 0)))
    await one.tasks[0]
    task = weakref.ref(one.tasks.pop())
    gc.collect()
    assert task() is None
    assert one.futures[0].done()


async def test_what_is_to_follow_comes_after_all_that_were_woken() -> None:
    three = await waiters(3)
    assert not after_batch(lambda: three.log.append("never: nobody was woken"))

    async def wait(future: InlineFuture) -> None:
        await future
        assert after_batch(lambda: three.log.append("afterwards"))

    first = make()
    waiting = asyncio.create_task(wait(first))
    await asyncio.sleep(0)

    def call() -> None:
        run_with_inline_wakeups(
            lambda: (first.set_result(None), *(wake(three, number) for number in range(3)))
        )
        three.log.append("called")

    await called_by_the_loop(call)
    assert three.log[3:] == ["0 in task 0", "1 in task 1", "2 in task 2", "afterwards", "called"]
    await waiting


async def test_nothing_follows_one_that_is_alone() -> None:
    said: list[bool] = []

    async def wait(future: InlineFuture) -> None:
        await future
        said.append(after_batch(lambda: None))

    first = make()
    waiting = asyncio.create_task(wait(first))
    await asyncio.sleep(0)
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: first.set_result(None)))
    await waiting
    assert said == [False]
