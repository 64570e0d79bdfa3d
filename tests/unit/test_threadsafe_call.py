"""ensure_called(): it calls exactly once, even if the loop is closed, and does not wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from aiordma.loop import Loop, ensure_called, running_loop, threadsafe_call

if TYPE_CHECKING:
    pass

TIME_LIMIT = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


class FakeLoop:
    """A loop that a test runs and closes. It can run even after it was closed."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.scheduled: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.scheduled.append(callback)

    def is_closed(self) -> bool:
        return self.closed

    def run(self) -> None:
        while self.scheduled:
            self.scheduled.pop()()


def ensure_called_by(loop: FakeLoop, callback: Callable[[], None]) -> None:
    """ensure_called() on a FakeLoop, which has all the methods that it uses."""
    ensure_called(cast(Loop, loop), callback)


class Calls:
    """The calls of numbered callbacks, and the threads that made them."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self.made)

    def number(self, number: int = 0) -> Callable[[], None]:
        def call() -> None:
            self.threads.append(threading.current_thread())
            self.made.append(number)

        return call


@pytest.fixture
def calls() -> Calls:
    return Calls()


class Watchers:
    """The library's threads that were started after this object was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    @property
    def count(self) -> int:
        new = set(threading.enumerate()) - self._before
        return sum(thread.name.startswith("aiordma") for thread in new)


@pytest.fixture
def watchers(monkeypatch: pytest.MonkeyPatch) -> Watchers:
    """A watcher for this test alone. It has no thread at first, and its idle thread ends soon."""
    monkeypatch.setattr(threadsafe_call, "_watcher", threadsafe_call._Watcher())
    monkeypatch.setattr(threadsafe_call, "WATCH_SECONDS", 0.002)
    return Watchers()


@pytest.fixture
def loops(watchers: Watchers) -> Iterator[Callable[[], asyncio.AbstractEventLoop]]:
    """A function that makes loops. All are closed at the end, so that the watcher stops."""
    made: list[asyncio.AbstractEventLoop] = []

    def make() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    yield make
    for loop in made:
        loop.close()
    wait_until(lambda: watchers.count == 0)


MakeLoop = Callable[[], asyncio.AbstractEventLoop]


# --- a loop that runs ---


@pytest.mark.asyncio
async def test_a_running_loop_calls_it_on_its_own_thread(watchers: Watchers, calls: Calls) -> None:
    loop = running_loop()
    threading.Thread(target=lambda: ensure_called(loop, calls.number())).start()
    async with asyncio.timeout(TIME_LIMIT):
        while not calls:
            await asyncio.sleep(0.001)
        while watchers.count:
            await asyncio.sleep(0.001)
    assert calls.threads == [threading.current_thread()]


@pytest.mark.asyncio
async def test_a_running_loop_calls_in_order(watchers: Watchers, calls: Calls) -> None:
    for number in range(20):
        ensure_called(running_loop(), calls.number(number))
    await asyncio.sleep(0)
    assert calls.made == list(range(20))


# --- a loop that is closed ---


def test_on_a_closed_loop_the_calling_thread_calls_at_once(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    loop = loops()
    loop.close()
    ensure_called(loop, calls.number())
    assert calls.threads == [threading.current_thread()]
    assert watchers.count == 0


def test_calls_of_a_loop_closed_later_are_made_by_the_watcher(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    loop = loops()
    for number in range(3):
        ensure_called(loop, calls.number(number))
    loop.close()
    wait_until(lambda: len(calls) == 3 and watchers.count == 0)
    assert calls.made == [0, 1, 2]
    assert threading.current_thread() not in calls.threads


# --- never twice ---


@pytest.fixture
def quick_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("quick_switches")
def test_a_loop_closed_concurrently_gets_each_call_made_exactly_once(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    each, rounds = 5, 200

    def schedule_all(loop: asyncio.AbstractEventLoop, start: int) -> None:
        for number in range(start, start + each):
            ensure_called(loop, calls.number(number))

    for round_number in range(rounds):
        loop = loops()
        thread = threading.Thread(target=schedule_all, args=(loop, round_number * each))
        thread.start()
        for _ in range(round_number % 4):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        thread.join(TIME_LIMIT)
    wait_until(lambda: len(calls) >= rounds * each)
    wait_until(lambda: watchers.count == 0)
    assert Counter(calls.made) == Counter(range(rounds * each))


@pytest.mark.usefixtures("quick_switches")
def test_the_loop_and_the_watcher_never_both_call_it(
    watchers: Watchers, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threadsafe_call, "WATCH_SECONDS", 0)
    loop, count = FakeLoop(closed=True), 3000
    for number in range(count):
        ensure_called_by(loop, calls.number(number))
        if number % 3 == 0:
            loop.run()
    loop.run()
    wait_until(lambda: watchers.count == 0)
    assert Counter(calls.made) == Counter(range(count))
    assert len(set(calls.threads)) > 1  # otherwise there was no race


# --- the watcher ---


def test_the_watching_thread_ends_and_is_started_again(watchers: Watchers, calls: Calls) -> None:
    for count in (1, 2, 3):
        loop = FakeLoop()
        ensure_called_by(loop, calls.number())
        assert watchers.count == 1
        time.sleep(0.02)
        assert watchers.count == 1  # something is outstanding
        loop.run()
        assert len(calls) == count
        wait_until(lambda: watchers.count == 0)


def test_nothing_is_referenced_after_the_call(watchers: Watchers) -> None:
    class Owner:
        def finish(self) -> None:
            pass

    outstanding = FakeLoop()  # keeps the watcher running
    ensure_called_by(outstanding, lambda: None)
    for closed in (False, True):
        owner, loop = Owner(), FakeLoop(closed=closed)
        references = weakref.ref(owner), weakref.ref(loop)
        ensure_called_by(loop, owner.finish)
        if closed:
            loop.scheduled.clear()
        else:
            loop.run()
        del owner, loop
        wait_until(partial(are_dead, references))
    outstanding.run()
    wait_until(lambda: watchers.count == 0)


def are_dead(references: tuple[weakref.ref[Any], ...]) -> bool:
    return all(reference() is None for reference in references)


def test_an_outstanding_call_does_not_keep_the_interpreter_from_exiting() -> None:
    code = (
        "import asyncio; from aiordma.loop import ensure_called\n"
        "loop = asyncio.new_event_loop()\n"
        "ensure_called(loop, lambda: print('called'))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_without_a_thread_ensure_called_does_not_wait_either(
    watchers: Watchers, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CheckedLoop(FakeLoop):
        checks = 0

        def is_closed(self) -> bool:
            self.checks += 1
            if threading.current_thread() is threading.main_thread() and self.checks > 3:
                raise AssertionError("the loop's thread waits for the loop")
            return False

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = CheckedLoop()
    monkeypatch.setattr(threading.Thread, "start", start)
    ensure_called_by(loop, calls.number())
    assert len(calls) == 0
    loop.run()
    assert len(calls) == 1


def test_a_call_without_a_thread_is_watched_with_the_next_call(
    watchers: Watchers, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = FakeLoop(closed=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        ensure_called_by(loop, calls.number(1))
    assert (len(calls), watchers.count) == (0, 0)
    ensure_called_by(loop, calls.number(2))
    wait_until(lambda: calls.made == [1, 2])


def test_a_callback_that_raises_does_not_keep_others_from_being_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("raised by the callback")

    calls = Calls()
    loop = FakeLoop()
    ensure_called_by(loop, fail)
    ensure_called_by(loop, calls.number(1))
    loop.closed = True
    wait_until(lambda: len(calls) == 1)
    later = FakeLoop()
    ensure_called_by(later, calls.number(2))
    later.closed = True
    wait_until(lambda: len(calls) == 2)
    assert "raised by the callback" in caplog.text
