"""WaitQueue, FairSemaphore and Deadline, and their behaviour when cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Coroutine
from functools import partial
from typing import Any
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation

from aiordma.loop import Deadline, FairSemaphore, WaitQueue, running_loop, task_groups
from aiordma.loop.deadline import KEPT


class Waiters:
    """Tasks that wait with a function, again and again, and a log of their wake-ups."""

    def __init__(self, wait: Any, count: int) -> None:
        self.log: list[int] = []

        async def repeat(number: int) -> None:
            while True:
                await wait()
                self.log.append(number)

        self.tasks = [asyncio.create_task(repeat(number)) for number in range(count)]

    async def settle(self) -> list[int]:
        """Let every task run until it waits. Return the new entries of the log."""
        before = len(self.log)
        for _ in range(10):
            await asyncio.sleep(0)
        return self.log[before:]


async def wait(queue: WaitQueue) -> None:
    await queue.wait()


@pytest.mark.asyncio
async def test_wake_all_wakes_the_tasks_that_wait_now_in_their_order() -> None:
    queue = WaitQueue(running_loop())
    waiters = Waiters(queue.wait, 4)
    await waiters.settle()
    await loops.cancel(waiters.tasks[1])
    assert len(queue) == 3
    waiters.tasks[0].cancel()
    queue.wake_all()  # it passes over the task that is being cancelled
    assert len(queue) == 0
    assert (await waiters.settle(), len(queue)) == ([2, 3], 2)  # they wait again
    await loops.cancel(*waiters.tasks[2:])
    woken = await loops.start(wait(queue))
    queue.wake_all()
    later = asyncio.create_task(wait(queue))
    await loops.cancel(woken)  # after its wake-up
    assert len(queue) == 1
    queue.wake_all()
    await later


@pytest.mark.asyncio
async def test_cancelled_waits_take_no_memory_although_nothing_wakes_the_queue() -> None:
    queue = WaitQueue(running_loop())
    first = await loops.start(wait(queue))
    for _ in range(100):
        await loops.cancel(await loops.start(wait(queue)))
    (futures,) = (each for each in gc.get_referents(queue) if isinstance(each, list))
    assert (len(queue), len(futures) < 20) == (1, True)
    queue.wake_all()
    await first


@pytest.mark.asyncio
async def test_waking_a_task_of_a_closed_loop_does_nothing() -> None:
    other = asyncio.new_event_loop()
    queue, semaphore = WaitQueue(other), FairSemaphore(other, 0)
    waiting: list[Any] = [wait(queue), wait(queue), semaphore.acquire()]
    for coroutine in waiting:  # run it up to its future
        future = coroutine.send(None)
        future.add_done_callback(lambda _: None, context=contextvars.copy_context())
    other.close()
    queue.wake_all()
    semaphore.release()
    assert len(queue) == 0
    for coroutine in waiting:
        coroutine.close()


@pytest.mark.asyncio
async def test_units_are_granted_in_order_and_not_to_cancelled_tasks() -> None:
    semaphore = FairSemaphore(running_loop(), 2)
    await semaphore.acquire()
    assert [semaphore.try_acquire() for _ in range(2)] == [True, False]
    waiters = Waiters(semaphore.acquire, 5)
    await waiters.settle()
    semaphore.release()
    assert not semaphore.try_acquire()  # no task overtakes one that was granted a unit
    assert await waiters.settle() == [0]
    waiters.tasks[1].cancel()
    semaphore.release(2)
    assert await waiters.settle() == [2, 3]
    semaphore.release()
    waiters.tasks[4].cancel()  # its unit goes to the next
    assert await waiters.settle() == [0]
    await loops.cancel(*(waiters.tasks[number] for number in (0, 2, 3)))
    semaphore.release(5)
    assert (semaphore.free, waiters.log) == (5, [0, 2, 3, 0])


async def test_a_deadline_expires_unless_it_is_cancelled(simulation: Simulation) -> None:
    calls: list[int] = []
    deadlines = [Deadline(running_loop(), 1, partial(calls.append, number)) for number in range(3)]
    for _ in range(2):
        deadlines[1].cancel()
    assert not deadlines[0].expired
    await loops.sleep(2)
    assert [deadline.expired for deadline in deadlines] == [True, False, True]
    deadlines[0].cancel()
    assert (deadlines[0].expired, calls) == (True, [0, 2])


async def test_deadlines_of_equal_length_share_a_timer(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after many of them were cancelled, and they expire in their order."""
    loop = running_loop()
    timers: list[float] = []
    expired: list[float] = []
    call_later = loop.call_later

    def count(delay: float, callback: Any) -> Any:
        timers.append(delay)
        return call_later(delay, callback)

    monkeypatch.setattr(type(loop), "call_later", lambda _, *arguments: count(*arguments))
    for _ in range(3 * KEPT):
        Deadline(loop, 5, partial(pytest.fail, "it was cancelled")).cancel()
    for number in range(3):
        Deadline(loop, 5, partial(expired.append, number))
    assert timers == [5]
    monkeypatch.undo()
    await loops.sleep(4)
    Deadline(loop, 5, partial(expired.append, 3))
    await loops.sleep(2)
    assert expired == [0, 1, 2]
    await loops.sleep(4)
    assert expired == [0, 1, 2, 3]


def test_a_deadline_that_raises_does_not_delay_the_others() -> None:
    expired: list[int] = []
    errors: list[str] = []

    def fail() -> None:
        raise RuntimeError("it failed")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
        Deadline(loop, 0, fail)
        done = asyncio.Event()
        Deadline(loop, 0, partial(expired.append, 1))
        Deadline(loop, 0, done.set)
        await done.wait()

    asyncio.run(main())
    assert (expired, errors) == ([1], ["it failed"])


def test_deadlines_are_freed_with_their_loop() -> None:
    class Waiting:
        def wake(self) -> None:
            """Not called: the loop is closed before."""

    async def main() -> weakref.ref[Waiting]:
        waiting = Waiting()
        Deadline(running_loop(), 60, waiting.wake)
        return weakref.ref(waiting)

    waiting = asyncio.run(main())
    gc.collect()
    assert waiting() is None


def test_a_background_task_can_be_over_when_it_is_made() -> None:
    """As with asyncio.eager_task_factory, if it does not wait."""
    seen: list[int] = []

    async def work() -> None:
        seen.append(1)

    def create_task(coroutine: Coroutine[Any, Any, None]) -> object:
        with pytest.raises(StopIteration):
            coroutine.send(None)
        return object()

    before = set(task_groups._background)
    task_groups.run_in_background(Mock(create_task=create_task), work())
    assert (seen, task_groups._background) == ([1], before)
