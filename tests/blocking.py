"""Whether the thread of a loop was blocked: asleep anywhere but in the loop's own wait.

A heart beats on the loop. Time between two beats that the thread neither used, nor spent waiting
for a processor, it slept; a loop that works sleeps no longer than to the next beat. So a processor
that is slow or shared makes no false alarm, and a call that blocks is seen wherever it is. Another
thread looks where that is: if in the loop's own wait, the machine itself was late. It also looks
whether that can have been one sleep: hundreds of calls in one turn of the loop, each of which waits
a moment for a lock of the kernel, are no call that blocks.
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

INTERVAL = 0.05
# Timers of an emulated machine come late.
LIMIT = 0.3
# How much of that must have been possible in one sleep, as seen by one who looks now and then.
ONE_SLEEP = LIMIT * 2 / 3

# Where a loop waits: asyncio's (in its selector), trio's, and uvloop's, which is not Python.
OWN_WAITS = {("base_events.py", "_run_once"), ("_io_epoll.py", "get_events"), ("runners.py", "run")}
WAITING = "in the loop's own wait"


_excused = 0.0


@contextlib.contextmanager
def excused() -> Iterator[None]:
    """On the loop's thread: what blocks here is no fault. Starting a process is: whichever thread
    does it, it holds the interpreter's lock until the program is loaded."""
    global _excused
    begin = time.monotonic()
    try:
        yield
    finally:
        _excused += time.monotonic() - begin


class _Moment(NamedTuple):
    wall: float
    accounted: float
    """Seconds this thread has run, has waited for a processor, or was excused."""

    @classmethod
    def now(cls) -> _Moment:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return cls(time.monotonic(), (int(ran) + int(queued)) / 1e9 + _excused)


class Heart:
    """Beats every INTERVAL seconds, on the thread of the loop, which is the one that makes it."""

    def __init__(self) -> None:
        self._last = _Moment.now()
        self._longest = 0.0
        self._where = ""
        self._looked = ""
        self._one_sleep = 0.0
        self._last_look = self._last.wall
        self._thread = threading.get_ident()
        # Opened once: a test may leave no descriptors.
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def beat(self) -> None:
        """To be called again and again."""
        now = _Moment.now()
        # The machine may have been late for the one who looks, too.
        limit = LIMIT if self._looked else 2 * LIMIT
        asleep = (now.wall - self._last.wall) - (now.accounted - self._last.accounted) - INTERVAL
        one_sleep = max(self._one_sleep, now.wall - self._last_look)
        if asleep > max(limit, self._longest) and one_sleep > ONE_SLEEP and self._looked != WAITING:
            self._longest = asleep
            self._where = self._looked
        self._looked = ""
        self._one_sleep = 0.0
        self._last = now

    def _watch(self) -> None:
        """In a thread: look where it is when a beat does not come."""
        ran, since = b"", self._last_look
        while not self._stopped.wait(INTERVAL):
            now = time.monotonic()
            last, ran = ran, os.pread(self._schedstat, 100, 0)
            if ran != last:
                since = self._last_look  # it may have gone to sleep just after that
            self._last_look = now
            self._one_sleep = max(self._one_sleep, now - max(since, self._last.wall))
            if now - max(since, self._last.wall) > LIMIT / 2 + INTERVAL and not self._looked:
                self._looked = _where(sys._current_frames()[self._thread])

    def stop(self) -> None:
        """No beat comes any more."""
        self._stopped.set()
        self._watcher.join()
        os.close(self._schedstat)

    def complaint(self) -> str | None:
        """What is to be said about it, if the thread was blocked."""
        if not self._longest:
            return None
        where = self._where or "nobody could look: perhaps the interpreter's lock was held"
        return f"the loop's thread was blocked for {self._longest:.2f} s:\n{where}"


def _where(frame: FrameType) -> str:
    inner = frame.f_back if frame.f_code.co_name == "select" else frame
    if inner is not None:
        code = inner.f_code
        if (Path(code.co_filename).name, code.co_name) in OWN_WAITS:
            return WAITING
    return "".join(traceback.format_stack(frame, limit=12))
