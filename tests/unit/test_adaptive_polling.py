"""AdaptivePolling: a wait polls the completion queue only as long as that pays."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._native import fast_path
from aiordma.dispatch import adaptive_polling
from aiordma.dispatch.adaptive_polling import MAX_MISSES, MAX_WAKEUP_NS, AdaptivePolling

WAKEUP = 10_000
FACTOR = adaptive_polling.SHORT_WAIT_FACTOR * adaptive_polling.PARKING_FACTOR
LONGEST = FACTOR * WAKEUP
"""The limit of a short wait, in nanoseconds, if the measured part of a wake-up takes WAKEUP."""


class Rig:
    """An AdaptivePolling with a fake clock, and a ReceiveQueue that receives nothing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, busy: int = 0, adaptive: bool = True
    ) -> None:
        self.now = 1_000_000_000
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(adaptive_polling, "time", clock)
        self.queue = fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 64))
        self.dispatcher = fast_path.CompletionDispatcher(lambda: None)
        self.polling = AdaptivePolling(self.queue)
        cq: Any = SimpleNamespace(address=1)  # no test polls it
        self.polling.open(self.dispatcher, cq, busy, adaptive)

    def wait(self, nanoseconds: int, wakeup: int = WAKEUP) -> int:
        """Park for `nanoseconds`, and go on `wakeup` later. Return the next poll budget."""
        began = self.now
        woken = began + nanoseconds
        self.now = woken + wakeup
        self.polling.parked(began, woken)
        return self.queue.poll_budget


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_after_a_short_wait_the_next_polls_and_a_long_wait_stops_that(rig: Rig) -> None:
    assert rig.queue.poll_budget == 0  # the first wait polls once
    for wait in (1000, 50_000, LONGEST // 2):
        assert rig.wait(wait) == wait + wait // 2  # a little longer than the last
    for wait in (LONGEST, 10 * LONGEST, 1_000_000_000):
        assert (rig.wait(LONGEST - 1), rig.wait(wait)) == (LONGEST, 0)
    assert rig.wait(1000) > 0
    rig.queue.missed_polls += 1
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
    rig.dispatcher.event(0)
    arrived = rig.dispatcher.last_event_at
    rig.now = arrived + WAKEUP
    rig.polling.parked(arrived - 1000, rig.now)
    assert rig.queue.poll_budget == 1500
    rig.now += 100 * WAKEUP  # this time other tasks have polled: the event is an old one
    rig.polling.parked(rig.now - 2000, rig.now - 1000)
    assert rig.queue.poll_budget == 1500


def test_wakeups_are_averaged(rig: Rig) -> None:
    rig.wait(1000)
    # The new one has a weight of a quarter.
    longest = FACTOR * ((3 * WAKEUP + 5 * WAKEUP) // 4)
    assert rig.wait(longest - 1, 5 * WAKEUP) == longest


@pytest.mark.parametrize("misses", range(MAX_MISSES + 4))
def test_each_miss_doubles_the_short_waits_that_polling_needs(rig: Rig, misses: int) -> None:
    rig.queue.missed_polls += misses
    needed = 1 << min(misses, MAX_MISSES)
    found = [rig.wait(1000) > 0 for _ in range(needed + 3)]
    assert found == [False] * (needed - 1) + [True] * 4
    rig.queue.missed_polls += 1  # the count of short waits starts again
    assert rig.wait(1000) == -1
    rig.queue.missed_polls = 0  # a poll has found a message
    assert rig.wait(1000) > 0


@pytest.mark.parametrize("options", [{}, {"adaptive": False}, {"busy": 7000}])
def test_a_constant_poll_budget(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    rig = Rig(monkeypatch, **options)
    busy = options.get("busy", 0)
    for wait in (1000, LONGEST, 1000, 1000):
        budget = rig.wait(wait)
        assert budget == busy or not options
        assert rig.dispatcher.budget_start == rig.now  # a wait that goes on begins a new one
    rig.queue.missed_polls += 1
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
    assert released == 2  # the references of the AdaptivePolling and of the ReceiveQueue
    rig.polling.close()
