"""AdaptivePolling: a wait polls the completion queue only as long as that pays."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import loops
import pytest

from aiordma._native import fast_path
from aiordma.dispatch import adaptive_polling
from aiordma.dispatch.adaptive_polling import AdaptivePolling, AdaptiveWait
from aiordma.loop import WaitQueue

WAKEUP = 10_000
MAX_MISSES, MAX_WAKEUP_NS = fast_path.MAX_MISSES, fast_path.MAX_WAKEUP_NS
FORGIVING_HITS, FIRST_SHORT_WAITS = fast_path.FORGIVING_HITS, fast_path.FIRST_SHORT_WAITS
FACTOR = fast_path.SHORT_WAIT_FACTOR * fast_path.PARKING_FACTOR
PARKING = fast_path.PARKING_FACTOR * WAKEUP
"""The cost of parking, in nanoseconds, if the measured part of a wake-up takes WAKEUP."""
LONGEST = FACTOR * WAKEUP
"""The limit of a short wait, in nanoseconds, if the measured part of a wake-up takes WAKEUP."""


class Rig:
    """An AdaptivePolling with a time of its own, and a ReceiveQueue that receives nothing."""

    def __init__(self, *, busy: int = 0, adaptive: bool = True) -> None:
        self.now = 1_000_000_000
        self.queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 64))
        self.dispatcher = fast_path.CompletionDispatcher(lambda: None)
        self.polling = AdaptivePolling(self.queue)
        self.polling.open(self.dispatcher, busy, adaptive)

    def wait(self, nanoseconds: int, wakeup: int = WAKEUP) -> int:
        """Park for `nanoseconds`, and go on `wakeup` later. Return the next poll budget."""
        began = self.now
        woken = began + nanoseconds
        self.now = woken + wakeup
        self.polling.parked(began, woken, self.now)
        return self.queue.poll_budget

    def polled(self, *found: bool) -> None:
        """Note polls that found a message or not."""
        for value in found:
            self.polling.polled(value)


@pytest.fixture
def new() -> Rig:
    """One that has not polled yet."""
    return Rig()


@pytest.fixture
def rig(new: Rig) -> Rig:
    """One that has polled before. No hit is left to spend, and no miss counts."""
    new.polled(True)
    assert new.polling.may_go_on()
    return new


def test_the_first_poll_comes_after_two_short_waits(new: Rig) -> None:
    for waits in ([1000, LONGEST], [LONGEST, 1000, LONGEST]):
        assert [new.wait(wait) for wait in waits] == [0] * len(waits)
    assert FIRST_SHORT_WAITS == 2
    assert [new.wait(1000), new.wait(1000), new.wait(1000)] == [0, PARKING, PARKING]
    new.polled(True)
    assert [new.wait(LONGEST), new.wait(1000)] == [0, PARKING]


def test_after_a_short_wait_the_next_polls_and_a_long_wait_stops_that(rig: Rig) -> None:
    assert rig.queue.poll_budget == 0  # the first wait polls once
    for wait in (1000, PARKING // 2):
        assert rig.wait(wait) == PARKING
    for wait in (PARKING, LONGEST // 2):
        assert rig.wait(wait) == wait + wait // 2  # a little longer than the last
    for wait in (LONGEST, 10 * LONGEST, 1_000_000_000):
        assert (rig.wait(LONGEST - 1), rig.wait(wait)) == (LONGEST, 0)
    assert rig.wait(1000) > 0
    rig.polled(False)
    found = [rig.wait(nanoseconds) > 0 for nanoseconds in (1000, LONGEST, 1000, 1000)]
    assert found == [False, False, False, True]  # the count of short waits starts again


def test_the_measured_wakeup_is_limited(rig: Rig) -> None:
    queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 64))
    AdaptivePolling(queue).parked(0, 1000)  # it is not open
    assert queue.poll_budget == 0
    longest = FACTOR * MAX_WAKEUP_NS
    assert rig.wait(longest, 1_000_000_000) == 0
    assert rig.wait(longest - 1, 1_000_000_000) == longest


def test_the_wakeup_is_measured_from_the_event_on(rig: Rig) -> None:
    rig.dispatcher.handle_event()
    arrived = rig.dispatcher.last_event_at
    rig.now = arrived + WAKEUP
    wait = PARKING + PARKING // 2
    rig.polling.parked(arrived - wait, rig.now, rig.now)
    assert rig.queue.poll_budget == wait + wait // 2
    rig.now += 100 * WAKEUP  # this time other tasks have polled: the event is an old one
    rig.polling.parked(rig.now - wait - 1000, rig.now - 1000, rig.now)
    assert rig.queue.poll_budget == wait + wait // 2


def test_wakeups_are_averaged(rig: Rig) -> None:
    rig.wait(1000)
    # The new one has a weight of a quarter.
    longest = FACTOR * ((3 * WAKEUP + 5 * WAKEUP) // 4)
    assert rig.wait(longest - 1, 5 * WAKEUP) == longest


@pytest.mark.parametrize("misses", range(MAX_MISSES + 4))
def test_each_miss_doubles_the_short_waits_that_polling_needs(rig: Rig, misses: int) -> None:
    rig.polled(*[False] * misses)
    needed = 1 << min(misses, MAX_MISSES)
    found = [rig.wait(1000) > 0 for _ in range(needed + 3)]
    assert found == [False] * (needed - 1) + [True] * 4
    assert rig.polling.misses == min(misses, MAX_MISSES)
    rig.polled(False)  # the count of short waits starts again
    assert rig.wait(1000) == -1
    rig.polled(True)
    assert rig.wait(1000) > 0


@pytest.mark.parametrize("hits", range(FORGIVING_HITS + 3))
def test_a_miss_after_several_hits_is_not_counted(rig: Rig, hits: int) -> None:
    rig.polled(False, *[True] * hits, False)
    is_forgiven = hits >= FORGIVING_HITS
    assert rig.polling.misses == (0 if is_forgiven else 1 if hits else 2)
    assert (rig.wait(1000) > 0) == is_forgiven
    rig.polled(False)  # the second one in a row
    assert rig.wait(1000) == -1


def test_making_room_for_another_task_costs_a_hit(rig: Rig) -> None:
    rig.wait(1000)
    assert not rig.polling.may_go_on()
    rig.polled(*[True] * (FORGIVING_HITS + 3))
    assert [rig.polling.may_go_on() for _ in range(FORGIVING_HITS + 1)] == [True] * 4 + [False]
    rig.polled(*[True] * FORGIVING_HITS)
    assert rig.polling.may_go_on()
    rig.polled(False)
    assert rig.polling.misses == 1  # it counts, after fewer hits
    assert not rig.polling.may_go_on()


def test_with_a_constant_poll_budget_each_wait_makes_room_for_other_tasks() -> None:
    rig = Rig(busy=7000)
    assert [rig.polling.may_go_on() for _ in range(100)] == [True] * 100


@pytest.mark.parametrize("options", [{}, {"adaptive": False}, {"busy": 7000}])
def test_a_constant_poll_budget(options: dict[str, Any]) -> None:
    rig = Rig(**options)
    busy = options.get("busy", 0)
    for wait in (1000, LONGEST, 1000, 1000):
        budget = rig.wait(wait)
        assert budget == busy or not options
        assert rig.dispatcher.budget_start == rig.now  # a wait that goes on begins a new one
    rig.polled(False)
    assert rig.wait(1000) == (busy if options else -1)


def test_after_close_a_wait_does_not_poll(rig: Rig) -> None:
    rig.wait(1000)
    began, count = rig.dispatcher.budget_start, sys.getrefcount(rig.dispatcher)
    rig.polling.close()
    released = count - sys.getrefcount(rig.dispatcher)
    assert rig.queue.poll_budget == -1
    rig.now += 1_000_000
    rig.wait(1000)
    assert rig.dispatcher.budget_start == began
    assert released == 1  # the reference of the AdaptivePolling
    rig.polling.close()


class WaitRig:
    """An AdaptiveWait with a fake clock, whose polls a test counts, and that it can end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, busy: int = 0) -> None:
        self.now = 1_000_000_000
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(adaptive_polling, "time", clock)
        self.is_over = False
        self.polls: list[int] = []
        """The nanoseconds of each poll."""
        self.on_poll: Callable[[], object] = lambda: None
        self.nanoseconds = busy
        self.change = WaitQueue(asyncio.get_running_loop())
        poller: Any = self
        self.before_parking = mock.Mock()
        self.wait = AdaptiveWait(self.change, poller, self.before_parking)
        self.wait.open(fast_path.CompletionDispatcher(lambda: None), adaptive=True)

    async def until_adaptively(
        self, condition: Callable[[], bool], nanoseconds: int, policy: AdaptivePolling
    ) -> bool:
        """Poll, in place of BusyPoll."""
        self.polls.append(nanoseconds)
        self.on_poll()
        policy.polled(self.is_over)
        return self.is_over

    async def parked(self, nanoseconds: int) -> None:
        """Wait, and park for this time."""
        self.is_over = False
        waiting = await loops.start(self.wait.until(lambda: self.is_over))
        self.change.wake_all()  # something else has changed: the wait goes on
        await loops.settle()
        assert not waiting.done()
        self.is_over, self.now = True, self.now + nanoseconds
        self.change.wake_all()
        self.change.woken_at = self.now
        self.now += WAKEUP
        await waiting

    def end(self) -> None:
        self.is_over = True


@pytest.mark.asyncio
async def test_an_adaptive_wait_polls_after_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WaitRig(monkeypatch)
    wait = fast_path.PARKING_FACTOR * MAX_WAKEUP_NS  # the wake-up is over by the fake clock
    for _ in range(FIRST_SHORT_WAITS):
        await rig.parked(wait)
    assert rig.polls == []  # the first waits park
    assert rig.before_parking.call_count == 2 * FIRST_SHORT_WAITS  # each is woken twice
    rig.is_over, rig.on_poll = False, rig.end
    await rig.wait.until(lambda: rig.is_over)
    await rig.wait.until(lambda: rig.is_over)  # it is over already
    assert rig.polls == [wait + wait // 2]
    rig.on_poll = lambda: None
    await rig.parked(50_000)
    assert len(rig.polls) == 2
    await rig.parked(50_000)  # after a miss, one short wait is not enough
    assert len(rig.polls) == 2


@pytest.mark.asyncio
async def test_an_adaptive_wait_polls_again_after_a_miss_among_hits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = WaitRig(monkeypatch)
    for _ in range(FIRST_SHORT_WAITS):
        await rig.parked(50_000)
    rig.on_poll = rig.end
    for _ in range(FORGIVING_HITS):
        rig.is_over = False
        await rig.wait.until(lambda: rig.is_over)
    rig.on_poll = lambda: None
    for polls in (FORGIVING_HITS + 1, FORGIVING_HITS + 2):
        await rig.parked(50_000)
        assert len(rig.polls) == polls
    await rig.parked(50_000)  # after the second miss in a row, one short wait is not enough
    assert len(rig.polls) == FORGIVING_HITS + 2


@pytest.mark.asyncio
async def test_an_adaptive_wait_with_busy_poll_always_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = WaitRig(monkeypatch, busy=7000)
    for wait in (1000, 100 * LONGEST):
        await rig.parked(wait)
    assert rig.polls == [7000] * 2
