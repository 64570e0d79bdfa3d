"""ensure_called: called once whatever becomes of the loop, and nobody waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from aiordma.loop import ensure_called, running_loop
from aiordma.loop import threadsafe_call as handing

TIME_LIMIT = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


class FakeLoop:
    """A loop that runs when told to, and is closed when told to: also both at once."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.handed: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.handed.append(callback)

    def is_closed(self) -> bool:
        return self.closed

    def run(self) -> None:
        while self.handed:
            self.handed.pop()()


class Calls:
    """Counts calls of numbered callbacks, and knows the threads that made them."""

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
    """The library's threads that were started meanwhile."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    @property
    def count(self) -> int:
        new = set(threading.enumerate()) - self._before
        return sum(thread.name.startswith("aiordma") for thread in new)


@pytest.fixture
def watchers(monkeypatch: pytest.MonkeyPatch) -> Watchers:
    """A watcher for this test alone; it has no thread at first, and keeps none idle for long."""
    monkeypatch.setattr(handing, "_watcher", handing._Watcher())
    monkeypatch.setattr(handing, "WATCH_SECONDS", 0.002)
    return Watchers()


@pytest.fixture
def loops(watchers: Watchers) -> Iterator[Callable[[], asyncio.AbstractEventLoop]]:
    """Makes loops, all closed at the end, so that the watcher stops."""
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
async def test_handing_over_does_not_wait(watchers: Watchers, calls: Calls) -> None:
    ensure_called(running_loop(), calls.number())  # the loop could never get to it meanwhile
    assert len(calls) == 0
    await asyncio.sleep(0)
    assert len(calls) == 1


@pytest.mark.asyncio
async def test_the_order_is_kept(watchers: Watchers, calls: Calls) -> None:
    for number in range(20):
        ensure_called(running_loop(), calls.number(number))
    await asyncio.sleep(0)
    assert calls.made == list(range(20))


def test_a_loop_that_stands_still_is_left_its_time(loops: MakeLoop, calls: Calls) -> None:
    loop = loops()
    ensure_called(loop, calls.number())
    time.sleep(0.03)  # the watcher looked many times
    assert len(calls) == 0
    loop.run_until_complete(asyncio.sleep(0))
    assert calls.threads == [threading.current_thread()]


# --- a loop that is closed ---


def test_a_closed_loop_has_it_called_at_once(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    loop = loops()
    loop.close()
    ensure_called(loop, calls.number())
    assert calls.threads == [threading.current_thread()]
    assert watchers.count == 0


def test_a_loop_closed_before_it_gets_to_it_has_it_called_all_the_same(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    loop = loops()
    for number in range(3):
        ensure_called(loop, calls.number(number))
    loop.close()
    wait_until(lambda: len(calls) == 3 and watchers.count == 0)
    assert calls.made == [0, 1, 2]
    assert threading.current_thread() not in calls.threads


def test_one_loop_closed_does_not_end_the_others_wait(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    closing, staying = loops(), loops()
    ensure_called(staying, calls.number(1))
    ensure_called(closing, calls.number(2))
    closing.close()
    wait_until(lambda: calls.made == [2])
    time.sleep(0.02)
    staying.run_until_complete(asyncio.sleep(0))
    assert calls.made == [2, 1]


def test_a_callback_may_hand_over_more(loops: MakeLoop, watchers: Watchers, calls: Calls) -> None:
    first, second = loops(), loops()

    def more() -> None:
        ensure_called(first, calls.number(1))  # closed by now
        ensure_called(second, calls.number(2))

    ensure_called(first, more)
    first.close()
    wait_until(lambda: calls.made == [1])
    second.close()
    wait_until(lambda: calls.made == [1, 2])


# --- never twice ---


@pytest.fixture
def quick_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("quick_switches")
def test_a_loop_that_closes_meanwhile_has_it_called_exactly_once(
    loops: MakeLoop, watchers: Watchers, calls: Calls
) -> None:
    each, rounds = 5, 200

    def hand_all_over(loop: asyncio.AbstractEventLoop, start: int) -> None:
        for number in range(start, start + each):
            ensure_called(loop, calls.number(number))

    for turn in range(rounds):
        loop = loops()
        thread = threading.Thread(target=hand_all_over, args=(loop, turn * each))
        thread.start()
        for _ in range(turn % 4):
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
    monkeypatch.setattr(handing, "WATCH_SECONDS", 0)
    loop, count = FakeLoop(closed=True), 3000
    for number in range(count):
        ensure_called(loop, calls.number(number))  # type: ignore[arg-type]
        if number % 3 == 0:
            loop.run()
    loop.run()
    wait_until(lambda: watchers.count == 0)
    assert Counter(calls.made) == Counter(range(count))
    assert len(set(calls.threads)) > 1  # else nobody raced


def test_of_many_who_come_at_once_only_one_calls_it(calls: Calls) -> None:
    callers, rounds = 4, 200
    onces = [handing._Once(calls.number(number)) for number in range(rounds)]
    barrier = threading.Barrier(callers)

    def give_way(*_: object) -> object:
        time.sleep(0)  # before every line another thread gets its turn
        return give_way

    def run() -> None:
        for once in onces:
            barrier.wait(TIME_LIMIT)
            sys.settrace(give_way)
            once.run()
            sys.settrace(None)

    threads = [threading.Thread(target=run) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT)
    assert Counter(calls.made) == Counter(range(rounds))
    assert all(once.is_claimed for once in onces)


# --- the watcher ---


def test_one_thread_watches_over_all(loops: MakeLoop, watchers: Watchers, calls: Calls) -> None:
    made = [loops() for _ in range(5)]
    for loop in made:
        for _ in range(10):
            ensure_called(loop, calls.number())
    assert watchers.count == 1
    time.sleep(0.01)
    assert watchers.count == 1
    for loop in made:
        loop.close()
    wait_until(lambda: len(calls) == 50)
    assert len(set(calls.threads)) == 1


def test_the_watcher_goes_away_and_comes_back(watchers: Watchers, calls: Calls) -> None:
    for count in (1, 2, 3):
        loop = FakeLoop()
        ensure_called(loop, calls.number())  # type: ignore[arg-type]
        assert watchers.count == 1
        time.sleep(0.02)
        assert watchers.count == 1  # something is outstanding
        loop.run()
        assert len(calls) == count
        wait_until(lambda: watchers.count == 0)


def test_nothing_is_held_once_it_was_called(watchers: Watchers) -> None:
    class EndpointCallbacks:
        def finish(self) -> None:
            pass

    outstanding = FakeLoop()  # keeps the watcher at it
    ensure_called(outstanding, lambda: None)  # type: ignore[arg-type]
    for closed in (False, True):
        owner, loop = EndpointCallbacks(), FakeLoop(closed=closed)
        gone = weakref.ref(owner), weakref.ref(loop)
        ensure_called(loop, owner.finish)  # type: ignore[arg-type]
        if closed:
            loop.handed.clear()
        else:
            loop.run()
        del owner, loop
        wait_until(lambda gone=gone: [ref() for ref in gone] == [None, None])
    outstanding.run()
    wait_until(lambda: watchers.count == 0)


def test_what_is_never_called_keeps_no_interpreter_from_exiting() -> None:
    code = (
        "import asyncio; from aiordma.loop import ensure_called\n"
        "loop = asyncio.new_event_loop()\n"
        "ensure_called(loop, lambda: print('called'))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_nobody_waits_even_where_no_thread_is_to_be_had(
    watchers: Watchers, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(FakeLoop):
        looks = 0

        def is_closed(self) -> bool:
            self.looks += 1
            if threading.current_thread() is threading.main_thread() and self.looks > 3:
                raise AssertionError("the loop's own thread waits for the loop")
            return False

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = Watched()
    monkeypatch.setattr(threading.Thread, "start", start)
    ensure_called(loop, calls.number())  # type: ignore[arg-type]
    assert len(calls) == 0
    loop.run()
    assert len(calls) == 1


def test_what_found_no_thread_is_watched_over_with_the_next(
    watchers: Watchers, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = FakeLoop(closed=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        ensure_called(loop, calls.number(1))  # type: ignore[arg-type]
    assert (len(calls), watchers.count) == (0, 0)
    ensure_called(loop, calls.number(2))  # type: ignore[arg-type]
    wait_until(lambda: calls.made == [1, 2])


def test_a_callback_that_raises_does_not_keep_others_from_being_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("as asked")

    calls = Calls()
    loop = FakeLoop()
    ensure_called(loop, fail)
    ensure_called(loop, calls.number(1))
    loop.closed = True
    wait_until(lambda: len(calls) == 1)
    later = FakeLoop()
    ensure_called(later, calls.number(2))
    later.closed = True
    wait_until(lambda: len(calls) == 2)
    assert "as asked" in caplog.text
