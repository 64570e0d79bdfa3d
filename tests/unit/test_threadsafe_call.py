"""ensure_called(): it calls exactly once, even if the loop is closed, and does not wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from loops import block_until

from aiordma.loop import Loop, ensure_called, running_loop, threadsafe_call
from aiordma.loop.threadsafe_call import IDLE_ROUNDS, _Watcher


class FakeLoop:
    """A loop that a test runs and closes. It can run even after it was closed."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.checks = 0
        self.scheduled: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.scheduled.append(callback)

    def is_closed(self) -> bool:
        self.checks += 1
        return self.closed

    def was_checked(self, times: int) -> bool:
        return self.checks > times

    def ensure_called(self, callback: Callable[[], None]) -> None:
        ensure_called(cast(Loop, self), callback)

    def run(self) -> None:
        while self.scheduled:
            self.scheduled.pop()()


@pytest.fixture(autouse=True)
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watcher]:
    """A watcher for this test alone. It has no thread at first, and its idle thread ends soon."""
    made = _Watcher()
    monkeypatch.setattr(threadsafe_call, "_watcher", made)
    monkeypatch.setattr(threadsafe_call, "WATCH_SECONDS", 0.002)
    yield made
    block_until(lambda: not made._running, "the watching thread to end")


@pytest.mark.asyncio
async def test_a_running_loop_calls_on_its_own_thread_and_in_order() -> None:
    loop, done, calls = running_loop(), asyncio.Event(), list[tuple[int, threading.Thread]]()

    def call(number: int) -> None:
        calls.append((number, threading.current_thread()))

    def schedule() -> None:
        for number in range(20):
            ensure_called(loop, partial(call, number))
        ensure_called(loop, done.set)

    threading.Thread(target=schedule).start()
    await done.wait()
    assert calls == [(number, threading.current_thread()) for number in range(20)]


def test_an_object_that_is_collected_while_the_lock_is_held_makes_a_call(
    watcher: _Watcher,
) -> None:
    loop, called = FakeLoop(closed=True), threading.Event()
    with watcher._lock:
        loop.ensure_called(called.set)
    called.wait()


def test_calls_of_a_loop_closed_later_are_made_by_the_watcher() -> None:
    loop, calls = asyncio.new_event_loop(), list[int]()
    for number in range(3):
        ensure_called(loop, partial(calls.append, number))
    assert not calls
    loop.close()
    block_until(lambda: calls == [0, 1, 2], "three calls")


def test_a_loop_closed_concurrently_gets_each_call_once(watcher: _Watcher) -> None:
    each, rounds, usual, calls = 5, 200, sys.getswitchinterval(), list[int]()

    def schedule_all(loop: asyncio.AbstractEventLoop, start: int) -> None:
        for number in range(start, start + each):
            ensure_called(loop, partial(calls.append, number))

    sys.setswitchinterval(1e-6)
    try:
        for start in range(0, rounds * each, each):
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=schedule_all, args=(loop, start))
            thread.start()
            for _ in range(start // each % 4):
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            thread.join()
        block_until(lambda: not watcher._running, "the watching thread to end")
    finally:
        sys.setswitchinterval(usual)
    assert sorted(calls) == list(range(rounds * each))


def test_a_callback_that_is_being_called_is_not_called_by_another_thread() -> None:
    loop, calls = FakeLoop(closed=True), list[int]()

    def call() -> None:
        calls.append(0)
        for run in loop.scheduled:
            other = threading.Thread(target=run)
            other.start()
            other.join()

    loop.ensure_called(call)
    loop.ensure_called(partial(calls.append, 1))
    block_until(lambda: len(calls) == 2, "both calls")
    loop.run()
    assert sorted(calls) == [0, 1]


def test_the_watching_thread_waits_for_the_last_call(watcher: _Watcher) -> None:
    for _ in range(2):
        loop, calls = FakeLoop(), list[int]()
        loop.ensure_called(partial(calls.append, 1))
        block_until(partial(loop.was_checked, 2 * IDLE_ROUNDS), "many checks")
        assert watcher._running
        loop.run()
        assert calls == [1]
        block_until(lambda: not watcher._running, "the watching thread to end")


@pytest.mark.parametrize("closed", [False, True])
def test_nothing_is_referenced_after_the_call(closed: bool) -> None:
    class Owner:
        def call(self) -> None:
            pass

    outstanding = FakeLoop()  # keeps the watcher running
    outstanding.ensure_called(lambda: None)
    owner, loop = Owner(), FakeLoop(closed=closed)
    references: list[weakref.ref[Any]] = [weakref.ref(owner), weakref.ref(loop)]
    loop.ensure_called(owner.call)
    if closed:
        loop.scheduled.clear()
    else:
        loop.run()
    del owner, loop
    block_until(lambda: not any(one() for one in references), "the call to be forgotten")
    outstanding.run()


def test_an_outstanding_call_does_not_keep_the_interpreter_from_exiting() -> None:
    code = (
        "import asyncio; from aiordma.loop import ensure_called\n"
        "loop = asyncio.new_event_loop()\n"
        "ensure_called(loop, lambda: print('called'))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_call_without_a_thread_is_watched_with_the_next_call(watcher: _Watcher) -> None:
    loop, calls = FakeLoop(closed=True), list[int]()
    with patch.object(threading.Thread, "start", side_effect=RuntimeError):
        loop.ensure_called(partial(calls.append, 1))
    assert (calls, loop.checks, watcher._running) == ([], 0, False)  # it does not wait either
    loop.ensure_called(partial(calls.append, 2))
    block_until(lambda: calls == [1, 2], "both calls")


def test_a_callback_that_raises_does_not_stop_others(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    for number in (1, 2):
        loop = FakeLoop()
        loop.ensure_called(Mock(side_effect=ZeroDivisionError("in a callback")))
        loop.ensure_called(partial(calls.append, number))
        loop.closed = True
        block_until(partial(calls.count, number), "the other call")
    assert "in a callback" in caplog.text
