"""SharedCompletionQueue: a completion queue that queue pairs share."""

from __future__ import annotations

from aiordma.verbs import CompletionChannel, CompletionQueue


class SharedCompletionQueue:
    """A completion queue that queue pairs share, and the number of its free entries.

    Each queue pair reserves entries. The queue never has more reserved entries than its capacity,
    so it cannot overflow, which would break all queue pairs.
    """

    def __init__(self, channel: CompletionChannel, entries: int) -> None:
        self.cq = CompletionQueue(channel, entries)
        self.free = self.cq.capacity
        """The number of entries that are not reserved."""
        self.is_armed = False
        """True if the next completion raises an event."""
        self.pollers = 0
        """The number of tasks that poll the queue. They need no event."""
        self.is_arming_scheduled = False
        """True if the loop will call _arm_again() in its next iteration."""

    def close(self) -> None:
        """Destroy the queue."""
        self.cq.close()
