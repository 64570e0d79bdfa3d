"""IdWaits: the waits of an id in worker threads that have no time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from aiordma.errors import LocalClosed
from aiordma.loop import Interrupt

T = TypeVar("T")


class IdWaits:
    """The waits that are under way, and their interrupts. Callable from any thread."""

    def __init__(self) -> None:
        self._interrupts: set[Interrupt] = set()
        self._changed = threading.Condition()
        self._is_ended = False

    def run(self, function: Callable[[Interrupt], T], interrupt: Interrupt) -> T:
        """Return `function(interrupt)`. Called in a worker thread.

        Raises:
            LocalClosed: end() was called before.
        """
        with self._changed:
            if self._is_ended:
                raise LocalClosed("closed on this side")
            self._interrupts.add(interrupt)
        try:
            return function(interrupt)
        finally:
            with self._changed:
                self._interrupts.discard(interrupt)
                self._changed.notify_all()

    @property
    def interrupts(self) -> list[Interrupt]:
        """The interrupts of the waits under way."""
        return list(self._interrupts)

    def interrupt(self) -> None:
        """Make every wait under way return."""
        with self._changed:
            for interrupt in self._interrupts:
                interrupt.set()

    def end(self) -> None:
        """Make every wait under way return, and let none begin any more."""
        self._is_ended = True
        self.interrupt()

    def join(self) -> None:
        """Block until no wait is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._interrupts)
