"""Step: an operation of an id, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiordma.cm.states import CmCall
from aiordma.errors import VerbsError
from aiordma.loop import WorkerPool


@dataclass(slots=True)
class Step:
    """An operation of an id: the C call that starts it, and how it changes the state."""

    call: CmCall | None
    """The call in the table of states; None if it does not change the state."""
    start: Callable[[], None]
    """Make the C call."""
    pool: WorkerPool | None
    """The threads, one of which makes all calls of the step. None: the loop's thread makes them.
    A SyncCmId always uses the blocking pool."""
    prepare: Callable[[], None] = lambda: None
    """Called before `start`, in the same thread. Its errors are not translated."""
    translate: Callable[[VerbsError], Exception] = lambda error: error
    """Return the exception to raise for an error of `start`."""
    finish: Callable[[], None] = lambda: None
    """Called after `start`, in the same thread. Its errors are not translated."""
