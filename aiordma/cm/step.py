"""Step: one operation of an id, as a value: the call that starts it, and what its failure means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from aiordma.cm.states import CmCall
from aiordma.errors import VerbsError


class Executor(Enum):
    """Where a call is made."""

    LOOP = auto()
    """On the loop's thread: it does not block."""
    WORKER_POOL = auto()
    """In a worker thread: it takes milliseconds."""
    BLOCKING_POOL = auto()
    """In a worker thread of those that may take minutes."""


@dataclass(frozen=True, slots=True)
class Step:
    """A C call that starts something, and the events that end it."""

    call: CmCall | None
    """How it moves the state, if it does."""
    start: Callable[[], None]
    executor: Executor
    prepare: Callable[[], None] = lambda: None
    """What is done before it, in the same thread. Its errors are its own."""
    translate: Callable[[VerbsError], Exception] = lambda error: error
    """What the failure of the call means."""
