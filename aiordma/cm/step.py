"""Step: an operation of an id, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from aiordma.cm.states import CmCall
from aiordma.errors import VerbsError
from aiordma.loop import WorkerPool
from aiordma.rdmacm import IdCalls


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
    prepare: Callable[[], None] | None = None
    """Called before `start`, in the same thread. Its errors are not translated."""
    translate: Callable[[VerbsError], Exception] = lambda error: error
    """Return the exception to raise for an error of `start`."""
    finish: Callable[[], None] | None = None
    """Called after `start`, in the same thread. Its errors are not translated."""
    calls: IdCalls | None = None
    """The call of `start`, and calls before it, for a thread of C. Made in place of `start`.
    `prepare` and `finish` are then called in a worker thread."""

    def run(self) -> None:
        """Make the call in this thread, with what comes before and after it."""
        if self.prepare is not None:
            self.prepare()
        try:
            self.start()
        except VerbsError as error:
            self.raise_translated(error)
        if self.finish is not None:
            self.finish()

    def raise_translated(self, error: VerbsError) -> NoReturn:
        """Raise the exception for an error of `start` or of `calls`."""
        failure = self.translate(error)
        if failure is error:
            raise error
        raise failure from error
