"""From a worker thread back to the loop's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 5.0


def post(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback` soon; on a closed loop nobody needs it any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def hand_over(loop: Loop, callback: Callable[[], None]) -> None:
    """Have the loop call `callback`, or call it here if the loop is closed before it gets to it.

    For worker threads: waits until it was called, some seconds at most. (A loop that is closed
    drops the calls it was handed last.)
    """
    once = _Once(callback)
    try:
        loop.call_soon_threadsafe(once.run)
    except RuntimeError:
        once.run()
        return
    for _ in range(round(PATIENCE_SECONDS / POLL_SECONDS)):
        if once.done.wait(POLL_SECONDS):
            return
        if loop.is_closed():
            once.run()
            return


class _Once:
    """A callback that is called once, by whoever comes first."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._claim = threading.Lock()
        self.done = threading.Event()

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            self._callback()
            self.done.set()
