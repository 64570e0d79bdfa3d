"""Thread-safe calls that are made even if the loop is closed before it makes them.

A loop drops the calls that are still scheduled when it is closed. So one thread watches all calls
that must not be dropped. It makes those of a closed loop itself.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

logger = logging.getLogger(__name__)

# Each round makes a busy loop's thread give up the interpreter's lock.
WATCH_SECONDS = 0.5
# The watching thread ends after this number of rounds without work: more work often follows soon.
IDLE_ROUNDS = 3


def ensure_called(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback` soon, exactly once, even if the loop is closed.

    If the loop is closed already, it is called in this thread. If the loop is closed before it
    calls, the watching thread calls instead. Callable from any thread. Does not wait.
    """
    once = _Once(callback)
    try:
        loop.call_soon_threadsafe(once.run)
    except RuntimeError:
        once.run()
    else:
        watch_closed_loop(loop, once)


class WatchedCall(Protocol):
    """A call that must be made even if its loop is closed."""

    @property
    def is_claimed(self) -> bool:
        """True if the call is made, or if none is left to make."""

    def run(self) -> None:
        """Make the call, if it is due."""


def watch_closed_loop(loop: Loop, call: WatchedCall) -> None:
    """Have the watching thread call `run` again and again if `loop` is closed, until is_claimed.

    Callable from any thread.
    """
    _watcher.watch(loop, call)


class _Once:
    """A callback that several threads run, and that is called by the first of them only."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._claim = threading.Lock()

    @property
    def is_claimed(self) -> bool:
        """True if a thread has begun to call the callback."""
        return self._claim.locked()

    def run(self) -> None:
        """Call the callback, unless a thread has done so. Log what it raises."""
        if self._claim.acquire(blocking=False):
            try:
                self._callback()
            except Exception:  # the watching thread still has other callbacks to call
                logger.exception("a thread-safe call failed")


class _Watcher:
    """The thread that makes the calls of closed loops. It runs only while there are calls."""

    def __init__(self) -> None:
        # An object that is collected while the lock is held can submit a call, too.
        self._lock = threading.RLock()
        self._watched: list[tuple[Loop, WatchedCall]] = []
        self._running = False

    def watch(self, loop: Loop, call: WatchedCall) -> None:
        """Run `call` if `loop` is closed before it does.

        If the system allows no thread, a later watch() starts the thread for both.
        """
        with self._lock:
            self._watched.append((loop, call))
            if self._running or sys.is_finalizing():
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="aiordma-watcher", daemon=True).start()
        except RuntimeError:
            self._running = False

    def _run(self) -> None:
        idle = 0
        while self._must_continue(idle):
            time.sleep(WATCH_SECONDS)
            for loop, call in list(self._watched):
                if loop.is_closed():
                    call.run()
            idle = 0 if self._watched else idle + 1

    def _must_continue(self, idle: int) -> bool:
        """Forget the calls that were made. Return False if the thread can end.

        `idle` is the number of rounds without work.
        """
        with self._lock:
            self._watched = [entry for entry in self._watched if not entry[1].is_claimed]
            self._running = bool(self._watched) or idle < IDLE_ROUNDS
            return self._running


_watcher = _Watcher()
