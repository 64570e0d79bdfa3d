"""BusyPoll and LoopTimeBudget: polling ends in time, and it yields to the event loop."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import loops
import pytest
import pytest_asyncio

from aiordma._native import fast_path
from aiordma.dispatch import AdaptivePolling, BusyPoll, busy_poll
from aiordma.dispatch.busy_poll import MAX_POLL_NS
from aiordma.loop import LoopTimeBudget, running_loop

pytestmark = pytest.mark.asyncio

MS = 1_000_000
time_budget = importlib.import_module("aiordma.loop.time_budget")
BUDGET, LONGEST = fast_path.LOOP_BUDGET_NS, fast_path.MAX_LOOP_BUDGET_NS


class Rig:
    """BusyPolls with a fake clock that advances with each poll, and a queue without completions.

    The loop time budget has just begun.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        self.polls: list[int] = []
        """The nanoseconds of each poll_for()."""
        self.on_poll: Callable[[], object] = lambda: None
        self.queue: Any = SimpleNamespace(pollers=0)
        self.pollers_left: list[int] = []
        """The number of tasks that still polled after each stop_polling()."""
        self.state = fast_path.CompletionDispatcher(lambda: None)
        self.state.budget_start = self.now
        self.longest = MAX_POLL_NS
        self.budget = LoopTimeBudget(running_loop(), self.state)
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(busy_poll, "time", clock)
        monkeypatch.setattr(time_budget, "time", clock)

    def make(self, seconds: float) -> BusyPoll:
        loop_device: Any = self
        made = BusyPoll(loop_device, seconds)
        made.open(self.queue)
        return made

    def poll_for(self, queue: Any, nanoseconds: int) -> None:
        assert queue is self.queue
        assert self.queue.pollers
        self.polls.append(nanoseconds)
        self.now += min(nanoseconds, self.longest)
        self.on_poll()

    def stop_polling(self, queue: Any) -> None:
        assert queue is self.queue
        self.queue.pollers -= 1
        self.pollers_left.append(self.queue.pollers)

    async def until(self, is_over: Callable[[], bool], nanoseconds: int) -> None:
        """Poll, as a task does that waits."""
        await self.make(1.0).until(is_over, nanoseconds)


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def never() -> bool:
    return False


def runs_at_once(coroutine: Any) -> bool:
    """Run a coroutine. Return True if it needs no iteration of the event loop."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
    return True


async def test_polling_ends_after_its_time_or_when_the_condition_holds(rig: Rig) -> None:
    loop_device: Any = rig
    unopened, off = BusyPoll(loop_device, 1e-6), rig.make(0.0)
    assert (off.is_on, unopened.is_on, unopened.nanoseconds) == (False, True, 1000)
    assert all(runs_at_once(one.until(never, one.nanoseconds)) for one in (unopened, off))
    assert runs_at_once(rig.until(never, -1))
    assert (rig.polls, rig.pollers_left) == ([], [])
    rig.on_poll = lambda: setattr(rig, "now", rig.now - rig.polls[-1] + 10)
    assert runs_at_once(rig.until(lambda: len(rig.polls) == 3, MS // 2))
    assert rig.polls == [500_000, 499_990, 499_980]
    assert runs_at_once(rig.until(lambda: True, MS // 2))
    rig.on_poll, rig.now = lambda: None, 1000
    rig.polls.clear()
    for _ in range(2):  # each call has the whole time
        await rig.until(never, MS // 2)
    await rig.until(never, 10 * MS + 7000)  # a single poll is short
    assert max(rig.polls) <= MAX_POLL_NS == MS
    assert rig.now == 1000 + sum(rig.polls) == 1000 + 11 * MS + 7000
    rig.on_poll = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        await rig.until(never, MS)
    assert (rig.queue.pollers, rig.pollers_left[-1]) == (0, 0)


async def test_polling_that_is_not_allowed_now_yields_to_the_loop_first(rig: Rig) -> None:
    seen: list[int] = []
    rig.now += 2 * BUDGET  # the budget is exhausted
    running_loop().call_soon_threadsafe(lambda: seen.append(len(rig.polls)))
    await rig.until(never, MS // 10)
    assert (seen, len(rig.polls)) == ([0], 1)
    rig.state.open_post_lists = 1
    polling = await loops.start(rig.until(never, MS // 10))
    assert len(rig.polls) == 1
    rig.state.open_post_lists = 0  # the end of a callback does this, before the next iteration
    await polling
    assert len(rig.polls) == 2


async def test_the_queue_counts_the_tasks_that_poll(rig: Rig) -> None:
    tasks = [asyncio.create_task(rig.until(never, 10_000 * MS)) for _ in range(2)]
    while rig.queue.pollers < 2:
        await asyncio.sleep(0)
    for left in (1, 0):
        await loops.cancel(tasks.pop())
        assert (rig.pollers_left[-1], rig.queue.pollers) == (left, left)
    count = len(rig.polls)
    await asyncio.sleep(0)
    assert (len(rig.polls), len(rig.pollers_left)) == (count, 2)


def make_policy(rig: Rig) -> AdaptivePolling:
    policy = AdaptivePolling(fast_path.ReceiveQueue(fast_path.ReceiveRingCore(1, 1)))
    policy.open(rig.state, 0, True)
    return policy


def notify_at_the_second_poll(rig: Rig) -> None:
    """Let the second poll find a completion for another task."""

    def notify() -> None:
        if len(rig.polls) == 2:
            rig.state.notified_at = rig.now

    rig.on_poll = notify
    rig.longest = MS // 10


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_an_adaptive_poll_notes_what_it_found(rig: Rig, seconds: float) -> None:
    notify_at_the_second_poll(rig)
    busy, policy = rig.make(seconds), make_policy(rig)
    assert not await busy.until_adaptively(never, MS // 2, policy)
    # A polling time that the user has set has precedence over other tasks.
    assert (len(rig.polls), policy.misses) == (5 if seconds else 2, 1)
    assert await busy.until_adaptively(lambda: True, MS // 2, policy)
    assert policy.misses == 0


async def test_an_adaptive_poll_ends_for_other_tasks_or_lets_them_run(rig: Rig) -> None:
    notify_at_the_second_poll(rig)
    busy, policy, seen = rig.make(0.0), make_policy(rig), list[int]()
    assert not await busy.until_adaptively(never, MS // 2, policy)
    assert not await busy.until_adaptively(never, MS // 2, policy)
    assert len(rig.polls) == 2  # the loop has not run the other tasks yet
    policy.polled(True)
    running_loop().call_soon_threadsafe(lambda: seen.append(len(rig.polls)))
    assert not await busy.until_adaptively(never, MS // 2, policy)
    assert (seen, len(rig.polls)) == ([2], 7)
    assert rig.pollers_left == [0, 0, 0]


async def test_yielding_to_the_loop_begins_a_new_budget(rig: Rig) -> None:
    budget, rig.now = rig.budget, 4 * BUDGET
    assert [budget.is_exhausted(1000 + now * BUDGET) for now in (0, 2)] == [False, True]
    task = await loops.start(budget.yield_to_loop())
    await loops.cancel(task)
    assert rig.state.budget_start == 1000  # a cancelled yield does not change it
    await asyncio.sleep(0)
    await budget.yield_to_loop()
    assert rig.state.budget_start == 4 * BUDGET
    assert [budget.is_exhausted(now) for now in (4 * BUDGET, 5 * BUDGET)] == [False, False]
    assert budget.is_exhausted(5 * BUDGET + 1)
    rig.state.budget_start = 6 * BUDGET  # set by a wait that parked and was woken
    assert not budget.is_exhausted(7 * BUDGET)


async def test_yielding_tasks_share_a_budget(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic_ns=partial(next, itertools.count(1001)))
    monkeypatch.setattr(time_budget, "time", clock)
    await asyncio.gather(*(rig.budget.yield_to_loop() for _ in range(5)))
    assert rig.state.budget_start == 1006  # five calls before the first task went on


async def test_long_iterations_have_long_budgets(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = fast_path.BUDGET_FACTOR
    assert factor * 50_000 < BUDGET < factor * 100_000 < factor * 300_000 < LONGEST
    assert fast_path.BUSY_ITERATION_FACTOR == 4
    times = [0]
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic_ns=lambda: times.pop(0)))

    async def budget_after(count: int, took: int) -> int:
        """Have the loop run `count` iterations of `took` nanoseconds each."""
        for _ in range(count):
            times[:] = [1000, 1000 + took]
            await rig.budget.yield_to_loop()
        return rig.state.budget

    assert await budget_after(1, LONGEST) == LONGEST
    assert await budget_after(30, 100_000) == pytest.approx(factor * 100_000, rel=0.01)
    one_longer = await budget_after(1, 300_000)
    assert one_longer == pytest.approx(factor * 100_000 * 17 / 16, rel=0.01)
    assert await budget_after(100, 300_000) == factor * 300_000
    assert await budget_after(1, 100_000) == factor * 200_000
    # The usual time is at most four times the shortest: 400,000 ns. An iteration of more than four
    # times that has run other tasks, and these get as much time as polling.
    assert await budget_after(100, 450_000) == LONGEST
    assert await budget_after(1, 1_600_000) == LONGEST
    assert await budget_after(1, 1_600_001) == 1_600_001
    assert await budget_after(1, 100_000_000) == LONGEST
    assert await budget_after(30, 50_000) == BUDGET
    assert await budget_after(30, 0) == BUDGET
    assert await budget_after(1, 5) == 5
