"""WaitQueue, Slots and Deadline on asyncio, and what cancelling does to each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from aiordma.loop import Deadline, FairSemaphore, WaitQueue, running_loop

pytestmark = pytest.mark.asyncio


async def settle() -> None:
    """Let every task run until it has nothing left to do but wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- WaitQueue ---


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


async def test_waking_nobody_is_not_remembered() -> None:
    queue = WaitQueue(running_loop())
    queue.wake_all()
    task = asyncio.create_task(queue.wait())
    await settle()
    assert not task.done()
    await cancelled(task)


async def test_wake_all_wakes_those_who_wait_now() -> None:
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
    await cancelled(*tasks)


async def test_a_cancelled_task_leaves_the_queue() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    await cancelled(first)
    assert len(queue) == 1
    queue.wake_all()
    await second


async def test_a_task_that_is_being_cancelled_is_passed_over() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    first.cancel()
    queue.wake_all()
    await second
    assert first.cancelled()


async def test_a_task_that_is_being_cancelled_does_not_count() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    first.cancel()
    assert len(queue) == 1
    second.cancel()
    assert len(queue) == 0
    await cancelled(first, second)


async def test_a_wake_up_reaches_the_others_when_its_first_task_is_cancelled() -> None:
    queue = WaitQueue(running_loop())
    first, second = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await settle()
    queue.wake_all()
    await cancelled(first)
    assert first.cancelled()
    await second


async def test_a_task_cancelled_as_it_is_woken_leaves_those_who_came_later() -> None:
    queue = WaitQueue(running_loop())
    first = asyncio.create_task(queue.wait())
    await settle()
    queue.wake_all()
    later = asyncio.create_task(queue.wait())
    await cancelled(first)
    assert len(queue) == 1
    queue.wake_all()
    await later


def wait_begun(waiting: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine of another loop up to its future, which then has somebody to call."""
    waiting.send(None).add_done_callback(lambda future: None)


async def test_waking_a_task_of_a_closed_loop_does_nothing() -> None:
    other = asyncio.new_event_loop()
    queue, slots = WaitQueue(other), FairSemaphore(other, 0)
    waiting = [queue.wait(), queue.wait(), slots.acquire()]
    for coroutine in waiting:
        wait_begun(coroutine)
    other.close()
    queue.wake_all()
    slots.release()
    assert len(queue) == 0
    for coroutine in waiting:
        coroutine.close()


# --- Slots ---


class Holders:
    """Tasks that want a slot, what they got, and in which order."""

    def __init__(self, free: int) -> None:
        self.slots = FairSemaphore(running_loop(), free)
        self.served: list[int] = []

    def start(self, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._acquire(number))

    async def _acquire(self, number: int) -> None:
        await self.slots.acquire()
        self.served.append(number)


async def test_free_slots_are_taken_at_once() -> None:
    slots = FairSemaphore(running_loop(), 2)
    await slots.acquire()
    assert slots.try_acquire()
    assert not slots.try_acquire()
    assert slots.free == 0


async def test_waiting_tasks_are_served_in_order() -> None:
    holders = Holders(0)
    tasks = [holders.start(number) for number in range(5)]
    await settle()
    holders.slots.release(2)
    await settle()
    assert holders.served == [0, 1]
    holders.slots.release(5)
    await asyncio.gather(*tasks)
    assert holders.served == [0, 1, 2, 3, 4]
    assert holders.slots.free == 2


async def test_nobody_overtakes_a_task_that_was_handed_a_slot() -> None:
    holders = Holders(0)
    first, second = holders.start(1), holders.start(2)
    await settle()
    holders.slots.release()
    assert not holders.slots.try_acquire()
    await first
    assert not second.done()
    holders.slots.release()
    await second


async def test_a_task_cancelled_while_it_waits_takes_nothing() -> None:
    holders = Holders(0)
    first, second = holders.start(1), holders.start(2)
    await settle()
    await cancelled(first)
    holders.slots.release()
    await second
    assert (holders.served, holders.slots.free) == ([2], 0)


async def test_a_task_that_is_being_cancelled_is_handed_nothing() -> None:
    holders = Holders(0)
    first = holders.start(1)
    await settle()
    first.cancel()
    holders.slots.release()
    await cancelled(first)
    assert (holders.served, holders.slots.free) == ([], 1)


async def test_a_slot_handed_to_a_cancelled_task_goes_to_the_next() -> None:
    holders = Holders(0)
    first, second = holders.start(1), holders.start(2)
    await settle()
    holders.slots.release()
    await cancelled(first)
    await second
    assert (holders.served, holders.slots.free) == ([2], 0)


async def test_a_slot_handed_to_a_cancelled_task_is_free_if_nobody_waits() -> None:
    holders = Holders(0)
    first = holders.start(1)
    await settle()
    holders.slots.release()
    await cancelled(first)
    assert (holders.served, holders.slots.free) == ([], 1)
    assert holders.slots.try_acquire()


async def test_several_handed_slots_survive_several_cancellations() -> None:
    holders = Holders(0)
    tasks = [holders.start(number) for number in range(4)]
    await settle()
    holders.slots.release(3)
    await cancelled(*tasks[:3])
    await tasks[3]
    assert (holders.served, holders.slots.free) == ([3], 2)


class SlotsModel:
    """Many tasks that take, hold, give back and are cancelled at random, and a count beside them.

    No more are held than there are, and in the end all are back.
    """

    def __init__(self, seed: int, total: int) -> None:
        self.random = random.Random(seed)
        self.total = total
        self.slots = FairSemaphore(running_loop(), total)
        self.held = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def acquire(self) -> None:
        if not (self.random.random() < 0.3 and self.slots.try_acquire()):
            await self.slots.acquire()
        self.held += 1
        assert self.held <= self.total
        try:
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
        finally:
            self.held -= 1
            self.slots.release()

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
            assert 0 <= self.slots.free <= self.total - self.held
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert [error for error in results if isinstance(error, Exception)] == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("total", [1, 3])
async def test_no_slot_is_lost_or_doubled(seed: int, total: int) -> None:
    model = SlotsModel(seed, total)
    await asyncio.wait_for(model.run(steps=500), timeout=10)
    assert (model.held, model.slots.free) == (0, total)
    assert model.slots._granted == set()


# --- Deadline ---


async def test_a_deadline_expires_once_and_wakes() -> None:
    woken = asyncio.Event()
    deadline = Deadline(running_loop(), 0.01, woken.set)
    assert not deadline.expired
    await asyncio.wait_for(woken.wait(), timeout=5)
    assert deadline.expired


async def test_a_cancelled_deadline_never_comes() -> None:
    calls: list[None] = []
    deadline = Deadline(running_loop(), 0.0, lambda: calls.append(None))
    deadline.cancel()
    deadline.cancel()
    await asyncio.sleep(0.01)
    assert not deadline.expired
    assert calls == []


async def test_a_deadline_may_be_cancelled_after_it_came() -> None:
    deadline = Deadline(running_loop(), 0.0, lambda: None)
    await asyncio.sleep(0.01)
    deadline.cancel()
    assert deadline.expired
