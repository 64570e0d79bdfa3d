"""BusyPoll and Turn: polling that ends in time, and that leaves turns to the loop."""

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
turn_module = importlib.import_module("aiordma.loop.time_budget")


class Clock:
    """When the turn of the loop began, and how long it may be."""

    def __init__(self, budget_start: int = 0) -> None:
        self.budget_start = budget_start
        self.budget = LOOP_BUDGET_NS
        self.notified_at = 0
        self.open_post_lists = 0


class Rig:
    """A BusyPoll on a clock that goes on when it spins, and a queue in which nothing comes.

    Its task has just come from the loop.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 1000
        self.spins: list[int] = []
        self.on_spin: Callable[[], None] = lambda: None
        self.loop_turns = 0
        self.queue: Any = SimpleNamespace(pollers=0)
        self.polled_last: list[int] = []
        """How many still polled whenever one had done so."""
        self.clock = Clock(self.now)
        self.longest = MAX_POLL_NS
        self.budget = LoopTimeBudget(running_loop(), self.clock)
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(busy_poll, "time", clock)
        monkeypatch.setattr(turn_module, "time", clock)
        self.poll = BusyPoll(self, seconds)  # type: ignore[arg-type]
        self.poll.open(self.queue)  # type: ignore[arg-type]

    def poll_for(self, queue: object, nanoseconds: int) -> None:
        assert queue is self.queue
        assert self.queue.pollers
        self.spins.append(nanoseconds)
        self.now += min(nanoseconds, self.longest)
        self.on_spin()

    def stop_polling(self, queue: object) -> None:
        assert queue is self.queue
        self.queue.pollers -= 1
        self.polled_last.append(self.queue.pollers)

    async def until(self, is_over: Callable[[], bool]) -> None:
        """As those do who wait for something."""
        await self.poll.until(is_over, self.poll.nanoseconds)

    def watch_loop(self) -> asyncio.Task[None]:
        """Count the turns that the loop gets."""

        async def count() -> None:
            while True:
                self.loop_turns += 1
                await asyncio.sleep(0)

        return asyncio.create_task(count())


def never() -> bool:
    return False


async def test_without_seconds_it_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return False

    rig = Rig(monkeypatch, 0.0)
    with pytest.raises(StopIteration):  # nor does it wait
        rig.until(is_over).send(None)
    assert (rig.spins, asked) == ([], 0)


async def test_without_a_queue_it_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1.0)
    poll = BusyPoll(rig, 1.0)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        poll.until(never, poll.nanoseconds).send(None)
    assert rig.spins == []


async def test_nobody_looks_before_what_waits_to_be_posted_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.0005)
    rig.clock.open_post_lists = 1
    looking = asyncio.create_task(rig.until(never))
    await asyncio.sleep(0)
    assert rig.spins == []
    rig.clock.open_post_lists = 0  # as the end of the callback does, before the loop's next turn
    await looking
    assert rig.spins


async def test_what_is_over_already_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1.0)
    with pytest.raises(StopIteration):
        rig.until(lambda: True).send(None)
    assert rig.spins == []


async def test_it_ends_as_soon_as_the_condition_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    rig.on_spin = lambda: setattr(rig, "now", rig.now - rig.spins[-1] + 10)
    with pytest.raises(StopIteration):  # without a turn of the loop
        rig.until(lambda: len(rig.spins) == 3).send(None)
    assert rig.spins == [500_000, 499_990, 499_980]


async def test_it_looks_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0005)
    await rig.until(never)
    assert rig.spins == [500_000]
    await rig.until(never)  # and each time anew
    assert sum(rig.spins) == 2 * 500_000


async def test_one_look_is_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0105)
    await rig.until(never)
    assert max(rig.spins) <= MAX_POLL_NS == MS
    assert sum(rig.spins) == 10 * MS + 500_000
    assert rig.now == 1000 + sum(rig.spins)


async def test_the_loop_gets_a_turn_every_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.020)
    task = rig.watch_loop()
    turns_at: list[int] = []
    rig.on_spin = lambda: turns_at.append(rig.loop_turns)
    await rig.until(never)
    task.cancel()
    spent: dict[int, int] = {}
    for budget, nanoseconds in zip(turns_at, rig.spins, strict=True):
        spent[budget] = spent.get(budget, 0) + nanoseconds
    assert max(spent.values()) <= LOOP_BUDGET_NS + MAX_POLL_NS
    assert len(spent) >= 10  # turns of the loop that it went on in


async def test_a_timer_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    done: list[int] = []
    asyncio.get_running_loop().call_later(0, lambda: done.append(len(rig.spins)))
    await rig.until(lambda: bool(done))
    assert done[0] < 10


async def test_cancelling_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    task = asyncio.create_task(rig.until(never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    count = len(rig.spins)
    await asyncio.sleep(0)
    assert len(rig.spins) == count


async def test_those_who_poll_at_once_share_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.010)
    turns = rig.watch_loop()
    per_turn: dict[int, int] = {}

    def count() -> None:
        per_turn[rig.loop_turns] = per_turn.get(rig.loop_turns, 0) + rig.spins[-1]

    rig.on_spin = count
    others = [BusyPoll(rig, 0.010) for _ in range(5)]  # type: ignore[arg-type]
    for one in others:
        one.open(rig.queue)
    await asyncio.gather(*(one.until(never, one.nanoseconds) for one in others))
    turns.cancel()
    # A look that has begun is ended, but no other begins in the same turn.
    assert max(per_turn.values()) <= LOOP_BUDGET_NS + MAX_POLL_NS


# --- who polls ---


async def test_whether_there_is_any_polling_to_be_done() -> None:
    shared: Any = None
    assert (BusyPoll(shared, 0.0).is_on, BusyPoll(shared, 0.0).nanoseconds) == (False, 0)
    assert (BusyPoll(shared, 1e-6).is_on, BusyPoll(shared, 1e-6).nanoseconds) == (True, 1000)


async def test_how_long_is_said_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0)  # not by the options alone
    await rig.poll.until(never, 7000)
    assert rig.spins == [7000]
    await rig.poll.until(never, -1)
    assert rig.spins == [7000]


async def test_the_queue_knows_who_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 10.0)
    first = asyncio.create_task(rig.until(never))
    second = asyncio.create_task(rig.until(never))
    while rig.queue.pollers < 2:
        await asyncio.sleep(0)
    assert rig.polled_last == []
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (rig.polled_last, rig.queue.pollers) == ([1], 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (rig.polled_last, rig.queue.pollers) == ([1, 0], 0)


async def test_a_look_that_fails_is_one_that_has_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1.0)
    rig.on_spin = lambda: 1 // 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        await rig.until(never)
    assert rig.polled_last == [0]


@pytest.mark.parametrize("preemptible", [False, True])
async def test_who_gives_way_stops_when_others_want_the_loop(
    preemptible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(monkeypatch, 0.01)

    def tell() -> None:
        if len(rig.spins) == 2:
            rig.clock.notified_at = rig.now

    rig.on_spin = tell
    rig.longest = MS // 10
    await rig.poll.until(never, 10 * MS, preemptible=preemptible)
    assert (len(rig.spins) == 2) is preemptible
    assert rig.polled_last == [0]
    if preemptible:
        await rig.poll.until(never, 10 * MS, preemptible=True)
        assert len(rig.spins) == 2  # they still do


async def test_who_does_not_look_is_no_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0)
    await rig.until(never)
    assert rig.polled_last == []


async def test_who_comes_late_in_a_turn_lets_the_loop_have_its_own_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.0001)
    rig.now += 2 * LOOP_BUDGET_NS
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(rig.spins)))
    await rig.until(never)
    assert (seen, len(rig.spins)) == ([0], 1)


# --- turns ---


async def test_a_turn_is_used_up_after_a_while() -> None:
    budget = LoopTimeBudget(running_loop(), Clock(5))
    assert not budget.is_exhausted(5)
    assert not budget.is_exhausted(5 + LOOP_BUDGET_NS)
    assert budget.is_exhausted(6 + LOOP_BUDGET_NS)


async def test_the_next_turn_of_the_loop_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        turn_module, "time", SimpleNamespace(monotonic_ns=lambda: 4 * LOOP_BUDGET_NS)
    )
    budget = LoopTimeBudget(running_loop(), clock)
    assert not budget.is_exhausted(0)
    assert budget.is_exhausted(2 * LOOP_BUDGET_NS)
    await budget.yield_to_loop()
    assert clock.budget_start == 4 * LOOP_BUDGET_NS
    assert not budget.is_exhausted(4 * LOOP_BUDGET_NS)
    assert not budget.is_exhausted(5 * LOOP_BUDGET_NS)
    assert budget.is_exhausted(6 * LOOP_BUDGET_NS)


async def test_a_turn_begins_whenever_a_task_that_polls_says_so() -> None:
    clock = Clock()
    budget = LoopTimeBudget(running_loop(), clock)
    assert budget.is_exhausted(2 * LOOP_BUDGET_NS)
    clock.budget_start = 2 * LOOP_BUDGET_NS  # it was parked, and woken
    assert not budget.is_exhausted(3 * LOOP_BUDGET_NS)


async def test_who_comes_back_second_has_the_turn_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now = Clock(), 100

    def monotonic_ns() -> int:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr(turn_module, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget = LoopTimeBudget(running_loop(), clock)
    await asyncio.gather(*(budget.yield_to_loop() for _ in range(5)))
    assert clock.budget_start == 106  # five went, and this is when the first came back


async def test_polling_takes_longer_where_turns_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    took = iter((100_000, 50_000, 200_000, 200_001, 1_000_000, 100_000_000, 10_000, 10_000, 0, 5))
    now = 0

    def monotonic_ns() -> int:
        """Called before a turn of the loop, and after it."""
        nonlocal now, is_before
        is_before = not is_before
        now += 1000 if is_before else next(took)
        return now

    is_before = False
    monkeypatch.setattr(turn_module, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget, lengths = LoopTimeBudget(running_loop(), clock), list[int]()
    for _ in range(10):
        await budget.yield_to_loop()
        lengths.append(clock.budget)
    usual = BUDGET_FACTOR * 50_000
    assert usual < LOOP_BUDGET_NS < BUDGET_FACTOR * 100_000 < MAX_LOOP_BUDGET_NS
    assert BUSY_ITERATION_FACTOR * 50_000 == 200_000
    assert lengths == [
        BUDGET_FACTOR * 100_000,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        200_001,  # others had something to do, and get as much time as polling
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        LOOP_BUDGET_NS,
        5,
    ]


async def test_polling_has_an_end_where_turns_take_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now = Clock(), 0

    def monotonic_ns() -> int:
        nonlocal now
        now += MAX_LOOP_BUDGET_NS
        return now

    monkeypatch.setattr(turn_module, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    budget = LoopTimeBudget(running_loop(), clock)
    await budget.yield_to_loop()
    assert clock.budget == MAX_LOOP_BUDGET_NS
    assert not budget.is_exhausted(now + MAX_LOOP_BUDGET_NS)
    assert budget.is_exhausted(now + MAX_LOOP_BUDGET_NS + 1)


async def test_the_end_of_a_turn_lets_the_others_go_on() -> None:
    budget, seen = LoopTimeBudget(running_loop(), Clock()), list[str]()
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: seen.append("callback"))
    task = asyncio.create_task(asyncio.sleep(0))
    assert not budget.is_exhausted(0)
    await budget.yield_to_loop()
    assert seen == ["callback"]
    assert not budget.is_exhausted(time.monotonic_ns())
    await task


async def test_cancelling_the_end_of_a_turn_does_no_harm() -> None:
    clock = Clock()
    budget = LoopTimeBudget(running_loop(), clock)
    task = asyncio.create_task(budget.yield_to_loop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.budget_start == 0
    await asyncio.sleep(0)
    await budget.yield_to_loop()
    assert clock.budget_start
