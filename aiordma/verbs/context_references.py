"""Holds: who still needs a device's context, for when the device is gone and it is to be closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma._native._lib import IbvContext


class ContextReferences:
    """Counts, for each context, what was made from it and is not destroyed yet.

    A process that does not close its contexts of a removed device blocks the removal, and one that
    closes them too early pulls them away under its own objects.
    """

    def __init__(self) -> None:
        self.on_free: Callable[[], None] = lambda: None
        """Called when a context is held no more, in the thread that let go of it."""
        # Reentrant: an object may be closed by the garbage collector, in the middle of this.
        self._lock = RLock()
        self._counts: Counter[IbvContext] = Counter()

    def acquire(self, context: IbvContext) -> None:
        """One holder more."""
        with self._lock:
            self._counts[context] += 1

    def release(self, context: IbvContext) -> None:
        """One holder less."""
        with self._lock:
            self._counts[context] -= 1
            if self._counts[context]:
                return
            del self._counts[context]
        self.on_free()

    def has(self, context: IbvContext) -> bool:
        """Whether anybody holds it."""
        with self._lock:
            return self._counts[context] > 0


context_references = ContextReferences()
