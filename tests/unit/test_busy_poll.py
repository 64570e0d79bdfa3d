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
from aiordma.dispatch.busy_poll import LONGEST_LOOK
from aiordma.loop import Turn, running_loop
from aiordma.loop.time_budget import BUSY_TURN, LONGEST_TURN, TIMES_A_TURN, TURN_NANOSECONDS

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("patience")]

MS = 1_000_000
turn_module = importlib.import_module("aiordma.loop.time_budget")


class Clock:
    """When the turn of the loop began, and how long it may be."""

    def __init__(self, turn_began: int = 0) -> None:
        self.turn_began = turn_began
        self.turn_length = TURN_NANOSECONDS
        self.told_at = 0
        self.held = 0


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
        self.longest = LONGEST_LOOK
        self.turn = Turn(running_loop(), self.clock)
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(busy_poll, "time", clock)
        monkeypatch.setattr(turn_module, "time", clock)
        self.poll = BusyPoll(self, seconds)  # type: ignore[arg-type]
        self.poll.open(self.queue)  # type: ignore[arg-type]

    def spin(self, queue: object, nanoseconds: int) -> None:
        assert queue is self.queue
        assert self.queue.pollers
        self.spins.append(nanoseconds)
        self.now += min(nanoseconds, self.longest)
        self.on_spin()

    def polled(self, queue: object) -> None:
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
    rig.clock.held = 1
    looking = asyncio.create_task(rig.until(never))
    await asyncio.sleep(0)
    assert rig.spins == []
    rig.clock.held = 0  # as the end of the callback does, before the loop's next turn
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
    assert max(rig.spins) <= LONGEST_LOOK == MS
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
    for turn, nanoseconds in zip(turns_at, rig.spins, strict=True):
        spent[turn] = spent.get(turn, 0) + nanoseconds
    assert max(spent.values()) <= TURN_NANOSECONDS + LONGEST_LOOK
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
    assert max(per_turn.values()) <= TURN_NANOSECONDS + LONGEST_LOOK


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


@pytest.mark.parametrize("gives_way", [False, True])
async def test_who_gives_way_stops_when_others_want_the_loop(
    gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(monkeypatch, 0.01)

    def tell() -> None:
        if len(rig.spins) == 2:
            rig.clock.told_at = rig.now

    rig.on_spin = tell
    rig.longest = MS // 10
    await rig.poll.until(never, 10 * MS, gives_way=gives_way)
    assert (len(rig.spins) == 2) is gives_way
    assert rig.polled_last == [0]
    if gives_way:
        await rig.poll.until(never, 10 * MS, gives_way=True)
        assert len(rig.spins) == 2  # they still do


async def test_who_does_not_look_is_no_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0)
    await rig.until(never)
    assert rig.polled_last == []


async def test_who_comes_late_in_a_turn_lets_the_loop_have_its_own_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 0.0001)
    rig.now += 2 * TURN_NANOSECONDS
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(rig.spins)))
    await rig.until(never)
    assert (seen, len(rig.spins)) == ([0], 1)


# --- turns ---


async def test_a_turn_is_used_up_after_a_while() -> None:
    turn = Turn(running_loop(), Clock(5))
    assert not turn.is_used_up(5)
    assert not turn.is_used_up(5 + TURN_NANOSECONDS)
    assert turn.is_used_up(6 + TURN_NANOSECONDS)


async def test_the_next_turn_of_the_loop_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        turn_module, "time", SimpleNamespace(monotonic_ns=lambda: 4 * TURN_NANOSECONDS)
    )
    turn = Turn(running_loop(), clock)
    assert not turn.is_used_up(0)
    assert turn.is_used_up(2 * TURN_NANOSECONDS)
    await turn.end()
    assert clock.turn_began == 4 * TURN_NANOSECONDS
    assert not turn.is_used_up(4 * TURN_NANOSECONDS)
    assert not turn.is_used_up(5 * TURN_NANOSECONDS)
    assert turn.is_used_up(6 * TURN_NANOSECONDS)


async def test_a_turn_begins_whenever_a_task_that_polls_says_so() -> None:
    clock = Clock()
    turn = Turn(running_loop(), clock)
    assert turn.is_used_up(2 * TURN_NANOSECONDS)
    clock.turn_began = 2 * TURN_NANOSECONDS  # it was parked, and woken
    assert not turn.is_used_up(3 * TURN_NANOSECONDS)


async def test_who_comes_back_second_has_the_turn_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now = Clock(), 100

    def monotonic_ns() -> int:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr(turn_module, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    turn = Turn(running_loop(), clock)
    await asyncio.gather(*(turn.end() for _ in range(5)))
    assert clock.turn_began == 106  # five went, and this is when the first came back


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
    turn, lengths = Turn(running_loop(), clock), list[int]()
    for _ in range(10):
        await turn.end()
        lengths.append(clock.turn_length)
    usual = TIMES_A_TURN * 50_000
    assert usual < TURN_NANOSECONDS < TIMES_A_TURN * 100_000 < LONGEST_TURN
    assert BUSY_TURN * 50_000 == 200_000
    assert lengths == [
        TIMES_A_TURN * 100_000,
        TURN_NANOSECONDS,
        TURN_NANOSECONDS,
        200_001,  # others had something to do, and get as much time as polling
        TURN_NANOSECONDS,
        TURN_NANOSECONDS,
        TURN_NANOSECONDS,
        TURN_NANOSECONDS,
        TURN_NANOSECONDS,
        5,
    ]


async def test_polling_has_an_end_where_turns_take_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now = Clock(), 0

    def monotonic_ns() -> int:
        nonlocal now
        now += LONGEST_TURN
        return now

    monkeypatch.setattr(turn_module, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
    turn = Turn(running_loop(), clock)
    await turn.end()
    assert clock.turn_length == LONGEST_TURN
    assert not turn.is_used_up(now + LONGEST_TURN)
    assert turn.is_used_up(now + LONGEST_TURN + 1)


async def test_the_end_of_a_turn_lets_the_others_go_on() -> None:
    turn, seen = Turn(running_loop(), Clock()), list[str]()
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: seen.append("callback"))
    task = asyncio.create_task(asyncio.sleep(0))
    assert not turn.is_used_up(0)
    await turn.end()
    assert seen == ["callback"]
    assert not turn.is_used_up(time.monotonic_ns())
    await task


async def test_cancelling_the_end_of_a_turn_does_no_harm() -> None:
    clock = Clock()
    turn = Turn(running_loop(), clock)
    task = asyncio.create_task(turn.end())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.turn_began == 0
    await asyncio.sleep(0)
    await turn.end()
    assert clock.turn_began
