"""Step: an operation of an id, as a value. Executor: the thread that makes its C call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from aiordma.cm.states import CmCall
from aiordma.errors import VerbsError


class Executor(Enum):
    """The thread in which a call is made."""

    LOOP = auto()
    """The loop's thread, for a call that does not block."""
    WORKER_POOL = auto()
    """A thread of the worker pool, for a call that takes milliseconds."""
    BLOCKING_POOL = auto()
    """A thread of the blocking pool, for a call that can take minutes."""


@dataclass(slots=True)
class Step:
    """An operation of an id: the C call that starts it, and how it changes the state."""

    call: CmCall | None
    """The call in the table of states; None if it does not change the state."""
    start: Callable[[], None]
    """Make the C call."""
    executor: Executor
    """The thread in which `prepare` and `start` are called. A SyncCmId always uses a worker."""
    prepare: Callable[[], None] = lambda: None
    """Called before `start`, in the same thread. Its errors are not translated."""
    translate: Callable[[VerbsError], Exception] = lambda error: error
    """Return the exception to raise for an error of `start`."""
    finish: Callable[[], None] = lambda: None
    """Called after `start`, in the same thread. Its errors are not translated."""
