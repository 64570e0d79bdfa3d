"""The event-loop methods that the core needs, named as in asyncio.

The loops of asyncio and uvloop already have these methods, so the running loop is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Protocol


class LoopFuture(Protocol):
    """A future that wakes the task that awaits it. Its result is always None."""

    def done(self) -> bool:
        """Return True if the future was set, or the task that awaited it was cancelled."""

    def set_result(self, result: None, /) -> None:
        """Wake the waiting task."""

    def __await__(self) -> Generator[object, None, None]:
        """Wait until the future is set."""


class LoopTimer(Protocol):
    """A callback that is scheduled for later."""

    def cancel(self) -> None:
        """Cancel the callback."""


class Loop(Protocol):
    """An event loop. Call its methods on the loop's thread, unless their docstring allows more."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> object:
        """Call `callback` whenever `fd` is readable."""

    def remove_reader(self, fd: int, /) -> object:
        """Stop calling back for `fd`."""

    def create_future(self) -> LoopFuture:
        """Return a new future for one waiting task."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call `callback` in the loop's next iteration.

        Raises:
            RuntimeError: the loop is closed.
        """

    def call_soon_threadsafe(self, callback: Callable[[], None], /) -> object:
        """Call `callback` on the loop's thread, soon. Callable from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """

    def is_closed(self) -> bool:
        """Return True if the loop will never run again. Callable from any thread."""

    def time(self) -> float:
        """Return the loop's clock, in seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        """Call `callback` after `delay` seconds."""

    def create_task(self, coro: Coroutine[object, None, None], /) -> object:
        """Run `coro` in a new task. The caller keeps a reference to the returned object."""
