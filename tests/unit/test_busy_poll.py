"""BusyPoll and LoopTimeBudget: polling ends in time, and it yields to the event loop."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.dispatch import BusyPoll, busy_poll
from aiordma.dispatch.busy_poll import MAX_POLL_NS
from aiordma.loop import LoopTimeBudget, running_loop
from aiordma.loop.time_budget import (
    BUDGET_FACTOR,
    BUSY_ITERATION_FACTOR,
    LOOP_BUDGET_NS,
    MAX_LOOP_BUDGET_NS,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

MS = 1_000_000
time_budget = importlib.import_module("aiordma.loop.time_budget")


class FakeBudgetState:
    """The BudgetState of a fake dispatcher."""

    def __init__(self, budget_start: int = 0) -> None:
        self.budget_start = budget_start
        self.budget = LOOP_BUDGET_NS
        self.notified_at = 0
        self.open_post_lists = 0


class Rig:
    """A BusyPoll with a fake clock that advances with each poll, and a queue without completions.

    The loop time budget has just begun.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 1000
        self.polls: list[int] = []
        """The nanoseconds of each poll_for()."""
        self.on_poll: Callable[[], None] = lambda: None
        self.iterations = 0
        self.queue: Any = SimpleNamespace(pollers=0)
        self.pollers_left: list[int] = []
        """The number of tasks that still polled after each stop_polling()."""
        self.state = FakeBudgetState(self.now)
        self.longest = MAX_POLL_NS
        self.budget = LoopTimeBudget(running_loop(), self.state)
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(busy_poll, "time", clock)
        monkeypatch.setattr(time_budget, "time", clock)
        self.busy_poll = BusyPoll(self, seconds)  # type: ignore[arg-type]
        self.busy_poll.open(self.queue)  # type: ignore[arg-type]

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

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Poll for the time of the options, as a task does that waits."""
        await self.busy_poll.until(is_over, self.busy_poll.nanoseconds)

    def count_iterations(self) -> asyncio.Task[None]:
        """Count the iterations of the event loop."""

        async def count() -> None:
            while True:
                self.iterations += 1
                await asyncio.sleep(0)

        return asyncio.create_task(count())


def never() -> bool:
    return False


async def test_zero_seconds_do_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0

    def is_over() -> bool:
        nonlocal checks
        checks += 1
        return False

    rig = Rig(monkeypatch, 0.0)
    with pytest.raises(StopIteration):  # it does not wait either
        rig.until(is_over).send(None)
    assert (rig.polls, checks) == ([], 0)


async def test_until_before_open_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1.0)
    poll = BusyPoll(rig, 1.0)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        poll.until(never, poll.nanoseconds).send(None)
    assert rig.polls == []


async def test_until_with_unposted_requests_yields_to_the_loop_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.0005)
    rig.state.open_post_lists = 1
    polling = asyncio.create_task(rig.until(never))
    await asyncio.sleep(0)
    assert rig.polls == []
    rig.state.open_post_lists = 0  # the end of a callback does this, before the next iteration
    await polling
    assert rig.polls


async def test_a_condition_that_already_holds_does_not_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 1.0)
    with pytest.raises(StopIteration):
        rig.until(lambda: True).send(None)
    assert rig.polls == []


async def test_polling_ends_as_soon_as_the_condition_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    rig.on_poll = lambda: setattr(rig, "now", rig.now - rig.polls[-1] + 10)
    with pytest.raises(StopIteration):  # without an iteration of the event loop
        rig.until(lambda: len(rig.polls) == 3).send(None)
    assert rig.polls == [500_000, 499_990, 499_980]


async def test_polling_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    await rig.until(never)
    assert rig.polls == [500_000]
    await rig.until(never)  # each call has the whole time
    assert sum(rig.polls) == 2 * 500_000


async def test_a_single_poll_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0105)
    await rig.until(never)
    assert max(rig.polls) <= MAX_POLL_NS == MS
    assert sum(rig.polls) == 10 * MS + 500_000
    assert rig.now == 1000 + sum(rig.polls)


async def test_polling_yields_to_the_loop_every_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.020)
    task = rig.count_iterations()
    polled_in: list[int] = []
    rig.on_poll = lambda: polled_in.append(rig.iterations)
    await rig.until(never)
    task.cancel()
    spent: dict[int, int] = {}
    for iteration, nanoseconds in zip(polled_in, rig.polls, strict=True):
        spent[iteration] = spent.get(iteration, 0) + nanoseconds
    assert max(spent.values()) <= LOOP_BUDGET_NS + MAX_POLL_NS
    assert len(spent) >= 10  # iterations of the event loop in which it polled


async def test_polling_does_not_delay_a_timer_much(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    done: list[int] = []
    asyncio.get_running_loop().call_later(0, lambda: done.append(len(rig.polls)))
    await rig.until(lambda: bool(done))
    assert done[0] < 10


async def test_cancelling_ends_the_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    task = asyncio.create_task(rig.until(never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    count = len(rig.polls)
    await asyncio.sleep(0)
    assert len(rig.polls) == count


async def test_tasks_that_poll_share_one_loop_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.010)
    counting = rig.count_iterations()
    spent: dict[int, int] = {}

    def count() -> None:
        spent[rig.iterations] = spent.get(rig.iterations, 0) + rig.polls[-1]

    rig.on_poll = count
    others = [BusyPoll(rig, 0.010) for _ in range(5)]  # type: ignore[arg-type]
    for one in others:
        one.open(rig.queue)
    await asyncio.gather(*(one.until(never, one.nanoseconds) for one in others))
    counting.cancel()
    # A poll that has begun goes on, but no other poll begins in the same iteration.
    assert max(spent.values()) <= LOOP_BUDGET_NS + MAX_POLL_NS


# --- pollers ---


async def test_is_on_and_nanoseconds_follow_from_the_seconds() -> None:
    device: Any = None
    assert (BusyPoll(device, 0.0).is_on, BusyPoll(device, 0.0).nanoseconds) == (False, 0)
    assert (BusyPoll(device, 1e-6).is_on, BusyPoll(device, 1e-6).nanoseconds) == (True, 1000)


async def test_until_polls_for_its_own_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0)  # the seconds of the constructor do not limit it
    await rig.busy_poll.until(never, 7000)
    assert rig.polls == [7000]
    await rig.busy_poll.until(never, -1)
    assert rig.polls == [7000]


async def test_the_queue_counts_the_tasks_that_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    first = asyncio.create_task(rig.until(never))
    second = asyncio.create_task(rig.until(never))
    while rig.queue.pollers < 2:
        await asyncio.sleep(0)
    assert rig.pollers_left == []
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (rig.pollers_left, rig.queue.pollers) == ([1], 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (rig.pollers_left, rig.queue.pollers) == ([1, 0], 0)


async def test_a_poll_that_raises_calls_stop_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1.0)
    rig.on_poll = lambda: 1 // 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        await rig.until(never)
    assert rig.pollers_left == [0]


@pytest.mark.parametrize("preemptible", [False, True])
async def test_preemptible_polling_ends_when_other_tasks_have_completions(
    preemptible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(monkeypatch, 0.01)

    def notify() -> None:
        if len(rig.polls) == 2:
            rig.state.notified_at = rig.now

    rig.on_poll = notify
    rig.longest = MS // 10
    await rig.busy_poll.until(never, 10 * MS, preemptible=preemptible)
    assert (len(rig.polls) == 2) is preemptible
    assert rig.pollers_left == [0]
    if preemptible:
        await rig.busy_poll.until(never, 10 * MS, preemptible=True)
        assert len(rig.polls) == 2  # the loop has not run the other tasks yet


async def test_a_task_that_does_not_poll_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0)
    await rig.until(never)
    assert rig.pollers_left == []


async def test_polling_with_an_exhausted_budget_yields_to_the_loop_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.0001)
    rig.now += 2 * LOOP_BUDGET_NS
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(rig.polls)))
    await rig.until(never)
    assert (seen, len(rig.polls)) == ([0], 1)


# --- the loop time budget ---


async def test_a_budget_is_exhausted_after_its_time() -> None:
    budget = LoopTimeBudget(running_loop(), FakeBudgetState(5))
    assert not budget.is_exhausted(5)
    assert not budget.is_exhausted(5 + LOOP_BUDGET_NS)
    assert budget.is_exhausted(6 + LOOP_BUDGET_NS)


async def test_yielding_to_the_loop_begins_a_new_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FakeBudgetState()
    monkeypatch.setattr(
        time_budget, "time", SimpleNamespace(monotonic_ns=lambda: 4 * LOOP_BUDGET_NS)
    )
    budget = LoopTimeBudget(running_loop(), state)
    assert not budget.is_exhausted(0)
    assert budget.is_exhausted(2 * LOOP_BUDGET_NS)
    await budget.yield_to_loop()
    assert state.budget_start == 4 * LOOP_BUDGET_NS
    assert not budget.is_exhausted(4 * LOOP_BUDGET_NS)
    assert not budget.is_exhausted(5 * LOOP_BUDGET_NS)
    assert budget.is_exhausted(6 * LOOP_BUDGET_NS)


async def test_a_new_budget_start_begins_a_new_budget() -> None:
    state = FakeBudgetState()
    budget = LoopTimeBudget(running_loop(), state)
    assert budget.is_exhausted(2 * LOOP_BUDGET_NS)
    state.budget_start = 2 * LOOP_BUDGET_NS  # set by a wait that parked and was woken
    assert not budget.is_exhausted(3 * LOOP_BUDGET_NS)


async def test_tasks_that_yield_together_share_one_new_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, now = FakeBudgetState(), 100

    def monotonic_ns() -> int:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget = LoopTimeBudget(running_loop(), state)
    await asyncio.gather(*(budget.yield_to_loop() for _ in range(5)))
    assert state.budget_start == 106  # five calls before the first task went on


async def test_the_budget_is_longer_when_iterations_are_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = FakeBudgetState()
    took = iter((100_000, 50_000, 200_000, 200_001, 1_000_000, 100_000_000, 10_000, 10_000, 0, 5))
    now, is_before = 0, False

    def monotonic_ns() -> int:
        """Return the time before an iteration of the event loop, or after it."""
        nonlocal now, is_before
        is_before = not is_before
        now += 1000 if is_before else next(took)
        return now

    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget, lengths = LoopTimeBudget(running_loop(), state), list[int]()
    for _ in range(10):
        await budget.yield_to_loop()
        lengths.append(state.budget)
    usual = BUDGET_FACTOR * 50_000
    assert usual < LOOP_BUDGET_NS < BUDGET_FACTOR * 100_000 < MAX_LOOP_BUDGET_NS
    assert BUSY_ITERATION_FACTOR * 50_000 == 200_000
    assert lengths == [
        BUDGET_FACTOR * 100_000,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        200_001,  # other tasks had work in this iteration, and get as much time as polling
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        5,
    ]


async def test_the_budget_is_limited_when_iterations_are_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, now = FakeBudgetState(), 0

    def monotonic_ns() -> int:
        nonlocal now
        now += MAX_LOOP_BUDGET_NS
        return now

    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget = LoopTimeBudget(running_loop(), state)
    await budget.yield_to_loop()
    assert state.budget == MAX_LOOP_BUDGET_NS
    assert not budget.is_exhausted(now + MAX_LOOP_BUDGET_NS)
    assert budget.is_exhausted(now + MAX_LOOP_BUDGET_NS + 1)


async def test_yielding_to_the_loop_runs_its_callbacks() -> None:
    budget, seen = LoopTimeBudget(running_loop(), FakeBudgetState()), list[str]()
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: seen.append("callback"))
    task = asyncio.create_task(asyncio.sleep(0))
    assert not budget.is_exhausted(0)
    await budget.yield_to_loop()
    assert seen == ["callback"]
    assert not budget.is_exhausted(time.monotonic_ns())
    await task


async def test_a_cancelled_yield_does_not_change_the_budget() -> None:
    state = FakeBudgetState()
    budget = LoopTimeBudget(running_loop(), state)
    task = asyncio.create_task(budget.yield_to_loop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state.budget_start == 0
    await asyncio.sleep(0)
    await budget.yield_to_loop()
    assert state.budget_start
