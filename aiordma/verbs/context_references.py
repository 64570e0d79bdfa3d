"""ContextReferences: reference counts of device contexts, to close those of removed devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma._native._lib import IbvContext


class ContextReferences:
    """The number of objects of each context that are not destroyed yet.

    A process that does not close its context of a removed device blocks the removal. A process that
    closes it too early breaks its own objects of that context.
    """

    def __init__(self) -> None:
        self.on_free: Callable[[], None] = lambda: None
        """Called when a reference count becomes zero, in the thread that released the context."""
        # Reentrant: the garbage collector can close an object while this thread holds the lock.
        self._lock = RLock()
        self._counts: Counter[IbvContext] = Counter()

    def acquire(self, context: IbvContext) -> None:
        """Add one reference to `context`."""
        with self._lock:
            self._counts[context] += 1

    def release(self, context: IbvContext) -> None:
        """Drop one reference to `context`."""
        with self._lock:
            self._counts[context] -= 1
            if self._counts[context]:
                return
            del self._counts[context]
        self.on_free()

    def has(self, context: IbvContext) -> bool:
        """Return True if there are references to `context`."""
        with self._lock:
            return self._counts[context] > 0


context_references = ContextReferences()
