"""Detect a blocked loop thread: a thread that sleeps anywhere but where the loop waits for events.

A task on the loop calls tick() at a short interval. Between two ticks the thread runs, waits for a
processor, or sleeps. The kernel counts the first two; the rest is sleep. A loop that works sleeps
only until the next tick. So a slow or shared processor gives no false alarm, and a blocking call is
found wherever it is.

A second thread, the watcher, looks at the loop's thread at the same interval. A call blocks only if
the watcher has seen the thread asleep SAMPLES times in a row, and not in the loop's wait for
events. On a slow machine the watcher looks less often. So a call that is slow because the whole
machine is slow does not block. Nor is a call blocked while the machine stands still: then neither
thread runs. Hundreds of calls in one iteration of the loop that each wait shortly for a lock of the
kernel are not a blocking call either.
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
# The number of times that the watcher must see the thread asleep.
SAMPLES = 5
# Seconds of sleep that count as blocked if the watcher has waited for the GIL: a call has held it.
GIL_LIMIT = 2.0

# The functions in which a loop waits for events: asyncio's (in its selector), trio's, and the
# Python function that runs uvloop's loop.
EVENT_WAITS = {
    ("base_events.py", "_run_once"),
    ("_io_epoll.py", "get_events"),
    ("runners.py", "run"),
}
WAITING = "in the loop's wait for events"


_STATE = ("schedstat", "stat")
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
    def now(cls, schedstat: int) -> _Times:
        """Return those of the thread whose schedstat this is: an open file, see proc(5).

        A test can have used up all descriptors.
        """
        ran, queued, _ = os.pread(schedstat, 1000, 0).split()
        return cls(time.monotonic(), (int(ran) + int(queued)) / 1e9 + _allowed)


class BlockingDetector:
    """A detector for the thread that creates it, which calls tick() every INTERVAL seconds."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._longest_where = ""
        self._where = ""
        self._samples = self._most_samples = 0
        self._thread = threading.get_ident()
        # Opened once and closed in stop(): the fixture no_leaks counts descriptors.
        task = f"/proc/self/task/{threading.get_native_id()}"
        self._files = [os.open(f"{task}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _STATE]
        self._last = _Times.now(self._files[0])
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        task = f"/proc/self/task/{self._watcher.native_id}"
        self._watcher_file = os.open(f"{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._last_runs = 0

    def tick(self) -> None:
        """Note if the thread was blocked since the last tick."""
        now = _Times.now(self._files[0])
        was_seen = self._most_samples >= SAMPLES
        limit = LIMIT if was_seen else GIL_LIMIT
        asleep = (now.wall - self._last.wall) - (now.accounted - self._last.accounted) - INTERVAL
        # A thread that waits for the GIL runs every 5 ms. If the machine stood still, it did not.
        runs = int(os.pread(self._watcher_file, 1000, 0).split()[2])
        was_kept_out = runs - self._last_runs > asleep / INTERVAL
        self._last_runs = runs
        is_long = asleep > max(limit, self._longest)
        if is_long and (was_seen or was_kept_out) and self._where != WAITING:
            self._longest = asleep
            self._longest_where = self._where if was_seen else ""
        self._where = ""
        self._samples = self._most_samples = 0
        self._last = now

    def _watch(self) -> None:
        """Count how often the loop's thread is asleep. Note where. Runs in the watcher thread."""
        ran = b""
        while not self._stopped.wait(INTERVAL):
            last, (ran, status) = ran, (os.pread(file, 1000, 0) for file in self._files)
            if ran != last or status.rpartition(b")")[2].split()[0] == b"R":
                self._samples = 0
                continue
            self._samples += 1
            # First where: tick() can run before the next line.
            if self._samples == SAMPLES and not self._where:
                self._where = _where(sys._current_frames()[self._thread])
            self._most_samples = max(self._most_samples, self._samples)

    def stop(self) -> None:
        """Stop the watcher. No tick() follows."""
        self._stopped.set()
        self._watcher.join()
        for file in (*self._files, self._watcher_file):
            os.close(file)

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
