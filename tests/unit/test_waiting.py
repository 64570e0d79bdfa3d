"""WaitQueue, FairSemaphore and Deadline, and their behaviour when cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any

import loops
import pytest
from simulator import Simulation

from aiordma.loop import Deadline, FairSemaphore, WaitQueue, running_loop

on_asyncio = pytest.mark.asyncio


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel `tasks`, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- WaitQueue ---


@on_asyncio
async def test_tasks_are_woken_in_the_order_they_came() -> None:
    queue = WaitQueue(running_loop())
    woken: list[int] = []

    async def wait(number: int) -> None:
        await queue.wait()
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await settle()
    assert len(queue) == 3
    queue.wake_all()
    assert len(queue) == 0
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2]


@on_asyncio
async def test_wake_all_wakes_only_the_tasks_that_wait_now() -> None:
    queue = WaitQueue(running_loop())
    rounds: list[int] = []

    async def wait_twice(number: int) -> None:
        await queue.wait()
        rounds.append(number)
        await queue.wait()

    tasks = [asyncio.create_task(wait_twice(number)) for number in range(3)]
    await settle()
    queue.wake_all()
    await settle()
    assert rounds == [0, 1, 2]
    assert len(queue) == 3
    await cancel(*tasks)


@on_asyncio
async def test_a_cancelled_task_leaves_the_queue() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    await cancel(first)
    assert len(queue) == 1
    queue.wake_all()
    await second


@on_asyncio
async def test_wake_all_passes_over_a_task_that_is_being_cancelled() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    first.cancel()
    queue.wake_all()
    await second
    assert first.cancelled()


@on_asyncio
async def test_a_task_cancelled_after_its_wake_up_leaves_later_tasks_in_the_queue() -> None:
    queue = WaitQueue(running_loop())
    first = asyncio.create_task(queue.wait())
    await settle()
    queue.wake_all()
    later = asyncio.create_task(queue.wait())
    await cancel(first)
    assert len(queue) == 1
    queue.wake_all()
    await later


def wait_begun(waiting: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine of another loop up to its future, and add a callback to the future."""
    waiting.send(None).add_done_callback(lambda future: None)


@on_asyncio
async def test_waking_a_task_of_a_closed_loop_does_nothing() -> None:
    other = asyncio.new_event_loop()
    queue, semaphore = WaitQueue(other), FairSemaphore(other, 0)
    waiting = [queue.wait(), queue.wait(), semaphore.acquire()]
    for coroutine in waiting:
        wait_begun(coroutine)
    other.close()
    queue.wake_all()
    semaphore.release()
    assert len(queue) == 0
    for coroutine in waiting:
        coroutine.close()


# --- FairSemaphore ---


class Acquirers:
    """Tasks that acquire a unit, and the order in which they got it."""

    def __init__(self, free: int) -> None:
        self.semaphore = FairSemaphore(running_loop(), free)
        self.served: list[int] = []

    def start(self, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._acquire(number))

    async def _acquire(self, number: int) -> None:
        await self.semaphore.acquire()
        self.served.append(number)


@on_asyncio
async def test_free_units_are_acquired_at_once() -> None:
    semaphore = FairSemaphore(running_loop(), 2)
    await semaphore.acquire()
    assert semaphore.try_acquire()
    assert not semaphore.try_acquire()
    assert semaphore.free == 0


@on_asyncio
async def test_waiting_tasks_are_served_in_order() -> None:
    acquirers = Acquirers(0)
    tasks = [acquirers.start(number) for number in range(5)]
    await settle()
    acquirers.semaphore.release(2)
    await settle()
    assert acquirers.served == [0, 1]
    acquirers.semaphore.release(5)
    await asyncio.gather(*tasks)
    assert acquirers.served == [0, 1, 2, 3, 4]
    assert acquirers.semaphore.free == 2


@on_asyncio
async def test_no_task_overtakes_a_task_that_was_granted_a_unit() -> None:
    acquirers = Acquirers(0)
    first, second = acquirers.start(1), acquirers.start(2)
    await settle()
    acquirers.semaphore.release()
    assert not acquirers.semaphore.try_acquire()
    await first
    assert not second.done()
    acquirers.semaphore.release()
    await second


@on_asyncio
async def test_a_task_that_is_being_cancelled_is_granted_nothing() -> None:
    acquirers = Acquirers(0)
    first = acquirers.start(1)
    await settle()
    first.cancel()
    acquirers.semaphore.release()
    await cancel(first)
    assert (acquirers.served, acquirers.semaphore.free) == ([], 1)


@on_asyncio
async def test_a_unit_granted_to_a_cancelled_task_goes_to_the_next() -> None:
    acquirers = Acquirers(0)
    first, second = acquirers.start(1), acquirers.start(2)
    await settle()
    acquirers.semaphore.release()
    await cancel(first)
    await second
    assert (acquirers.served, acquirers.semaphore.free) == ([2], 0)


class SemaphoreModel:
    """Many tasks that acquire and release at random, and that are cancelled at random.

    The model counts the held units. There are never more than `total`, and none are left at the
    end.
    """

    def __init__(self, seed: int, total: int) -> None:
        self.random = random.Random(seed)
        self.total = total
        self.semaphore = FairSemaphore(running_loop(), total)
        self.held = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def acquire(self) -> None:
        if not (self.random.random() < 0.3 and self.semaphore.try_acquire()):
            await self.semaphore.acquire()
        self.held += 1
        assert self.held <= self.total
        try:
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
        finally:
            self.held -= 1
            self.semaphore.release()

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.6:
                self.tasks.add(asyncio.create_task(self.acquire()))
            for task in self.random.sample(sorted(self.tasks, key=id), min(2, len(self.tasks))):
                if self.random.random() < 0.4:
                    task.cancel()
            if self.random.random() < 0.7:
                await asyncio.sleep(0)
            self.tasks = {task for task in self.tasks if not task.done()}
            assert 0 <= self.semaphore.free <= self.total - self.held
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert [error for error in results if isinstance(error, Exception)] == []


@on_asyncio
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("total", [1, 3])
async def test_no_unit_is_lost_or_granted_twice(seed: int, total: int) -> None:
    model = SemaphoreModel(seed, total)
    await asyncio.wait_for(model.run(steps=500), timeout=10)
    assert (model.held, model.semaphore.free) == (0, total)
    assert model.semaphore._granted == set()


# --- Deadline ---


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
