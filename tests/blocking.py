"""Detect a blocked loop thread: a thread that sleeps anywhere but where the loop waits for events.

A task on the loop calls tick() at a short interval. Between two ticks the thread runs, waits for a
processor, or sleeps. The kernel counts the first two; the rest is sleep. A loop that works sleeps
only until the next tick. So a slow or shared processor gives no false alarm, and a blocking call is
found wherever it is.

A second thread, the watcher, notes where the loop's thread sleeps. If that is the loop's wait for
events, the machine was late and no call has blocked. The watcher also checks that the thread can
have slept once for that long. Hundreds of calls in one iteration of the loop that each wait shortly
for a lock of the kernel are not a blocking call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Seconds between two ticks.
INTERVAL = 0.05
# Seconds of sleep that count as blocked. Timers of an emulated machine expire late.
LIMIT = 0.3
# The least length of a single sleep, as the watcher measures it at its intervals.
ONE_SLEEP = LIMIT * 2 / 3

# The functions in which a loop waits for events: asyncio's (in its selector), trio's, and the
# Python function that runs uvloop's loop.
EVENT_WAITS = {
    ("base_events.py", "_run_once"),
    ("_io_epoll.py", "get_events"),
    ("runners.py", "run"),
}
WAITING = "in the loop's wait for events"


_allowed = 0.0


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Allow the block to block the loop's thread.

    Starting a process does so in any thread: the GIL is held until the program is loaded.
    """
    global _allowed
    begin = time.monotonic()
    try:
        yield
    finally:
        _allowed += time.monotonic() - begin


class _Times(NamedTuple):
    wall: float
    accounted: float
    """Seconds that this thread has run, has waited for a processor, or was allowed to block."""

    @classmethod
    def now(cls) -> _Times:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return cls(time.monotonic(), (int(ran) + int(queued)) / 1e9 + _allowed)


class BlockingDetector:
    """A detector for the thread that creates it, which calls tick() every INTERVAL seconds."""

    def __init__(self) -> None:
        self._last = _Times.now()
        self._longest = 0.0
        self._longest_where = ""
        self._where = ""
        self._one_sleep = 0.0
        self._last_check = self._last.wall
        self._thread = threading.get_ident()
        # Opened once and closed in stop(): the fixture no_leaks counts descriptors.
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def tick(self) -> None:
        """Note if the thread was blocked since the last tick."""
        now = _Times.now()
        # If the watcher has not seen it, the machine can have been late for both threads.
        limit = LIMIT if self._where else 2 * LIMIT
        asleep = (now.wall - self._last.wall) - (now.accounted - self._last.accounted) - INTERVAL
        one_sleep = max(self._one_sleep, now.wall - self._last_check)
        if asleep > max(limit, self._longest) and one_sleep > ONE_SLEEP and self._where != WAITING:
            self._longest = asleep
            self._longest_where = self._where
        self._where = ""
        self._one_sleep = 0.0
        self._last = now

    def _watch(self) -> None:
        """Note where the loop's thread is if a tick is late. Runs in the watcher thread."""
        ran, since = b"", self._last_check
        while not self._stopped.wait(INTERVAL):
            now = time.monotonic()
            last, ran = ran, os.pread(self._schedstat, 100, 0)
            if ran != last:
                since = self._last_check  # it can have fallen asleep just after that
            self._last_check = now
            self._one_sleep = max(self._one_sleep, now - max(since, self._last.wall))
            if now - max(since, self._last.wall) > LIMIT / 2 + INTERVAL and not self._where:
                self._where = _where(sys._current_frames()[self._thread])

    def stop(self) -> None:
        """Stop the watcher. No tick() follows."""
        self._stopped.set()
        self._watcher.join()
        os.close(self._schedstat)

    def report(self) -> str | None:
        """Return how long and where the thread was blocked; None if it was not."""
        if not self._longest:
            return None
        where = self._longest_where or "the place is unknown: perhaps the GIL was held"
        return f"the loop's thread was blocked for {self._longest:.2f} s:\n{where}"


def _where(frame: FrameType) -> str:
    """Return WAITING if the thread waits for events, else its stack."""
    inner = frame.f_back if frame.f_code.co_name == "select" else frame
    if inner is not None:
        code = inner.f_code
        if (Path(code.co_filename).name, code.co_name) in EVENT_WAITS:
            return WAITING
    return "".join(traceback.format_stack(frame, limit=12))
