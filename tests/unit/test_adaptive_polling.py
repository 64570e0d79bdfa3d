"""Outlook: how long a wait looks at the completion queue, which is as long as that pays."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._native import fast_path
from aiordma.dispatch import adaptive_polling as outlook_module
from aiordma.dispatch.adaptive_polling import (
    MAX_MISSES,
    MAX_WAKEUP_NS,
    PARKING_FACTOR,
    SHORT_WAIT_FACTOR,
    AdaptivePolling,
)

TURN = 10_000
LONGEST = SHORT_WAIT_FACTOR * PARKING_FACTOR * TURN
"""What a wait may take that is short, where what is seen of parking takes TURN."""


class Rig:
    """An Outlook on a clock of its own, and Arrivals to which nothing comes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, busy: int = 0, adaptive: bool = True
    ) -> None:
        self.now = 1_000_000_000
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(outlook_module, "time", clock)
        self.arrivals = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 64))
        self.completions = fast_path.CompletionDispatcher(lambda: None)
        self.outlook = AdaptivePolling(self.arrivals)
        cq: Any = SimpleNamespace(address=1)  # nobody takes, or polls
        self.outlook.open(self.completions, cq, busy, adaptive)

    def wait(self, nanoseconds: int, turn: int = TURN) -> int:
        """Park for so long; the time_limit afterwards."""
        began = self.now
        woken = began + nanoseconds
        self.now = woken + turn
        self.outlook.parked(began, woken)
        return self.arrivals.poll_budget

    def miss(self) -> None:
        """It was looked in vain."""
        self.arrivals.missed_polls += 1


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_at_first_nobody_looks_longer_than_once(rig: Rig) -> None:
    assert rig.arrivals.poll_budget == 0


@pytest.mark.parametrize("wait", [1000, 50_000, LONGEST // 2])
def test_after_a_short_wait_the_next_looks_for_a_little_longer(rig: Rig, wait: int) -> None:
    assert rig.wait(wait) == wait + wait // 2


def test_nobody_looks_for_longer_than_parking_might_take(rig: Rig) -> None:
    assert rig.wait(LONGEST - 1) == LONGEST


@pytest.mark.parametrize("wait", [LONGEST, 10 * LONGEST, 1_000_000_000])
def test_a_long_wait_stops_it(rig: Rig, wait: int) -> None:
    assert rig.wait(1000) > 0
    assert rig.wait(wait) == 0
    assert rig.wait(1000) > 0


def test_a_slow_loop_makes_waits_short(rig: Rig) -> None:
    assert rig.wait(LONGEST) == 0
    for _ in range(20):
        rig.wait(LONGEST, 5 * TURN)
    assert rig.wait(LONGEST, 5 * TURN) > LONGEST


def test_one_slow_turn_is_not_believed_beyond_measure(rig: Rig) -> None:
    longest = SHORT_WAIT_FACTOR * PARKING_FACTOR * MAX_WAKEUP_NS
    assert rig.wait(longest, 1_000_000_000) == 0
    assert rig.wait(longest - 1, 1_000_000_000) == longest


def test_parking_is_seen_from_the_event_on(rig: Rig) -> None:
    rig.completions.event(0)
    came = rig.completions.last_event_at
    rig.now = came + TURN
    rig.outlook.parked(came - 1000, rig.now)
    assert rig.arrivals.poll_budget == 1500
    rig.now += 100 * TURN  # this time others have polled: the event is an old one
    rig.outlook.parked(rig.now - 2000, rig.now - 1000)
    assert rig.arrivals.poll_budget == 1500


def test_turns_are_averaged(rig: Rig) -> None:
    rig.wait(1000)
    # A quarter of it is the new one.
    average = (3 * TURN + 5 * TURN) // 4
    assert (
        rig.wait(SHORT_WAIT_FACTOR * PARKING_FACTOR * average - 1, 5 * TURN)
        == SHORT_WAIT_FACTOR * PARKING_FACTOR * average
    )


@pytest.mark.parametrize("misses", range(MAX_MISSES + 4))
def test_each_miss_doubles_how_many_short_waits_it_takes(rig: Rig, misses: int) -> None:
    for _ in range(misses):
        rig.miss()
    needed = 1 << min(misses, MAX_MISSES)
    found = [rig.wait(1000) > 0 for _ in range(needed + 3)]
    assert found == [False] * (needed - 1) + [True] * 4


def test_a_miss_has_the_counting_begin_again(rig: Rig) -> None:
    rig.miss()
    assert [rig.wait(1000) > 0 for _ in range(3)] == [False, True, True]
    rig.miss()
    assert [rig.wait(1000) > 0 for _ in range(4)] == [False, False, False, True]


def test_a_long_wait_has_the_counting_begin_again(rig: Rig) -> None:
    rig.miss()
    assert [rig.wait(wait) > 0 for wait in (1000, LONGEST, 1000, 1000)] == [
        False,
        False,
        False,
        True,
    ]


def test_after_a_miss_nobody_looks_even_once(rig: Rig) -> None:
    """What is found would be for others, one by one instead of all at once."""
    assert rig.wait(LONGEST) == 0
    rig.miss()
    assert [rig.wait(wait) for wait in (LONGEST, 1000)] == [-1, -1]


def test_a_message_that_came_in_time_makes_up_for_all_misses(rig: Rig) -> None:
    for _ in range(5):
        rig.miss()
    assert rig.wait(1000) == -1
    rig.arrivals.missed_polls = 0
    assert rig.wait(1000) > 0


@pytest.mark.parametrize("options", [{"adaptive": False}, {"busy": 7000}])
def test_what_is_not_adaptive_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    rig = Rig(monkeypatch, **options)
    busy = options.get("busy", 0)
    assert rig.arrivals.poll_budget == busy
    for wait in (1000, LONGEST, 1000, 1000):
        assert rig.wait(wait) == busy
    rig.miss()
    assert rig.wait(1000) == busy


@pytest.mark.parametrize("options", [{}, {"adaptive": False}, {"busy": 7000}])
def test_a_wait_that_goes_on_begins_a_turn(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    rig = Rig(monkeypatch, **options)
    for wait in (1000, 1_000_000):
        rig.wait(wait)
        assert rig.completions.budget_start == rig.now


def test_when_it_is_closed_nobody_looks(rig: Rig) -> None:
    rig.wait(1000)
    began, count = rig.completions.budget_start, sys.getrefcount(rig.completions)
    rig.outlook.close()
    release = count - sys.getrefcount(rig.completions)
    assert rig.arrivals.poll_budget == -1
    rig.now += 1_000_000
    rig.wait(1000)
    assert rig.completions.budget_start == began
    assert release == 2  # of the clock, and of where one looks
    rig.outlook.close()


def test_before_it_is_open_a_wait_does_no_harm() -> None:
    arrivals = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 64))
    AdaptivePolling(arrivals).parked(0, 1000)
    assert arrivals.poll_budget == 0
