"""SharedCompletionQueue: a completion queue that queue pairs share."""

from __future__ import annotations

from aiordma._native import fast_path
from aiordma.verbs import CompletionChannel, CompletionQueue


class SharedCompletionQueue(fast_path.PolledQueue):
    """A completion queue that queue pairs share, and the number of its free entries.

    Each queue pair reserves entries. The queue never has more reserved entries than its capacity,
    so it cannot overflow, which would break all queue pairs.
    """

    def __init__(self, channel: CompletionChannel, entries: int) -> None:
        super().__init__()
        self.cq = CompletionQueue(channel, entries)
        self.free = self.cq.capacity
        """The number of entries that are not reserved."""
        self.released = 0
        """The number of entries of destroyed queue pairs, whose completions can occupy them."""
        self.is_arming_scheduled = False
        """True if the loop will arm the queue in its next iteration."""
        self._open(self.cq.address)

    def close(self) -> None:
        """Destroy the queue."""
        self._open(0)
        self.cq.close()
