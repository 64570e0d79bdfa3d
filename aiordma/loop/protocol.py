"""What the core asks of an event loop, in asyncio's own words.

asyncio's loops, uvloop's among them, have these methods already: the running loop is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol


class LoopFuture(Protocol):
    """A wake-up: the task that awaits it goes on once it is set. Data never travels in it."""

    def done(self) -> bool:
        """Whether it was set, or its waiter was cancelled."""

    def set_result(self, result: None, /) -> None:
        """Wake the waiter."""

    def __await__(self) -> Generator[object, None, None]:
        """Wait for it."""


class LoopTimer(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None:
        """Do not call it after all."""


class Loop(Protocol):
    """An event loop. What does not say otherwise is called on the loop's own thread only."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> object:
        """Call `callback` whenever `fd` is readable."""

    def remove_reader(self, fd: int, /) -> object:
        """Stop that."""

    def create_future(self) -> LoopFuture:
        """Make a wake-up for one waiting task."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call `callback` in the loop's next turn; RuntimeError when it is closed."""

    def call_soon_threadsafe(self, callback: Callable[[], None], /) -> object:
        """Call `callback` on the loop's thread; RuntimeError when it is closed. From any thread."""

    def is_closed(self) -> bool:
        """Whether it will never run again. Called from any thread."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> LoopTimer:
        """Call `callback` after `delay` seconds."""
