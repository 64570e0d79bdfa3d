"""BusyPoll and LoopTimeBudget: polling ends in time, and it yields to the event loop."""

from __future__ import annotations

import asyncio
import importlib
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
    unopened = BusyPoll(rig, 1e-6)  # type: ignore[arg-type]
    assert (rig.busy_poll.is_on, unopened.is_on, unopened.nanoseconds) == (False, True, 1000)
    for polling in (rig.until(is_over), unopened.until(is_over, 1000)):
        with pytest.raises(StopIteration):  # it does not wait either
            polling.send(None)
    await rig.busy_poll.until(never, -1)
    assert (rig.polls, checks, rig.pollers_left) == ([], 0, [])


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


async def test_polling_ends_as_soon_as_the_condition_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    rig.on_poll = lambda: setattr(rig, "now", rig.now - rig.polls[-1] + 10)
    with pytest.raises(StopIteration):  # without an iteration of the event loop
        rig.until(lambda: len(rig.polls) == 3).send(None)
    assert rig.polls == [500_000, 499_990, 499_980]
    with pytest.raises(StopIteration):
        rig.until(lambda: True).send(None)
    assert len(rig.polls) == 3


async def test_polling_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    await rig.until(never)
    assert rig.polls == [500_000]
    await rig.until(never)  # each call has the whole time
    assert sum(rig.polls) == 2 * 500_000
    await rig.busy_poll.until(never, 10 * MS + 7000)  # a single poll is short
    assert max(rig.polls) <= MAX_POLL_NS == MS
    assert rig.now == 1000 + sum(rig.polls) == 1000 + 11 * MS + 7000


@pytest.mark.parametrize("tasks", [1, 5])
async def test_polling_yields_to_the_loop_every_millisecond(
    monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """Tasks that poll share one budget: none begins to poll after the budget in an iteration."""
    rig = Rig(monkeypatch, 0.020)
    task = rig.count_iterations()
    polled_in: list[int] = []
    rig.on_poll = lambda: polled_in.append(rig.iterations)
    await asyncio.gather(*(rig.until(never) for _ in range(tasks)))
    task.cancel()
    spent: dict[int, int] = {}
    for iteration, nanoseconds in zip(polled_in, rig.polls, strict=True):
        spent[iteration] = spent.get(iteration, 0) + nanoseconds
    assert max(spent.values()) <= LOOP_BUDGET_NS + MAX_POLL_NS
    assert len(spent) >= 10  # iterations of the event loop in which it polled


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


# --- pollers ---


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
    assert budget.is_exhausted(5 * LOOP_BUDGET_NS + 1)
    state.budget_start = 6 * LOOP_BUDGET_NS  # set by a wait that parked and was woken
    assert not budget.is_exhausted(7 * LOOP_BUDGET_NS)


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
    took = iter(
        (MAX_LOOP_BUDGET_NS, 100_000, 50_000, 200_000, 200_001, 1_000_000, 100_000_000, 0, 5)
    )
    now, is_before = 0, False

    def monotonic_ns() -> int:
        """Return the time before an iteration of the event loop, or after it."""
        nonlocal now, is_before
        is_before = not is_before
        now += 1000 if is_before else next(took)
        return now

    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget, lengths = LoopTimeBudget(running_loop(), state), list[int]()
    for _ in range(9):
        await budget.yield_to_loop()
        lengths.append(state.budget)
    usual = BUDGET_FACTOR * 50_000
    assert usual < LOOP_BUDGET_NS < BUDGET_FACTOR * 100_000 < MAX_LOOP_BUDGET_NS
    assert BUSY_ITERATION_FACTOR * 50_000 == 200_000
    assert lengths == [
        MAX_LOOP_BUDGET_NS,
        BUDGET_FACTOR * 100_000,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        200_001,  # other tasks had work in this iteration, and get as much time as polling
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        5,
    ]


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
