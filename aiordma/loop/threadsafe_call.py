"""From a worker thread back to the loop's thread, also when the loop is closed on the way.

A loop that is closed drops the calls it was handed last. What must not be dropped is watched until
it was called, by one thread for all, which calls it itself once the loop is closed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.05
# The watching thread stays for so many rounds without work: more is likely to come.
IDLE_ROUNDS = 20


def ensure_called(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback` soon; once the loop is closed, have it called all the same.

    Callable from any thread; does not wait.
    """
    once = _Once(callback)
    try:
        loop.call_soon_threadsafe(once.run)
    except RuntimeError:
        once.run()
    else:
        _watcher.watch(loop, once)


class _Once:
    """A callback that is called once, by whoever comes first."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._claim = threading.Lock()

    @property
    def is_claimed(self) -> bool:
        """Whether somebody has come."""
        return self._claim.locked()

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            try:
                self._callback()
            except Exception:  # the caller has others to see to
                logger.exception("what was handed over failed")


class _Watcher:
    """Sees to it that what was handed over is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[Loop, _Once]] = []
        self._running = False

    def watch(self, loop: Loop, once: _Once) -> None:
        """Watch over `once`, unless there is no thread to be had for it."""
        with self._lock:
            self._watched.append((loop, once))
            if self._running or sys.is_finalizing():
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="aiordma-watcher", daemon=True).start()
        except RuntimeError:
            self._running = False

    def _run(self) -> None:
        idle = 0
        while self._goes_on(idle):
            time.sleep(WATCH_SECONDS)
            for loop, once in list(self._watched):
                if loop.is_closed():
                    once.run()
            idle = 0 if self._watched else idle + 1

    def _goes_on(self, idle: int) -> bool:
        with self._lock:
            self._watched = [entry for entry in self._watched if not entry[1].is_claimed]
            self._running = bool(self._watched) or idle < IDLE_ROUNDS
            return self._running


_watcher = _Watcher()
