"""SharedCompletionQueue: a completion queue that queue pairs share."""

from __future__ import annotations

from aiordma._native import fast_path
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    PackedQueuePairInit,
    QueuePairCaps,
    QueuePairInit,
)

# Most queue pairs of a loop have the same capacity.
MAX_INITS = 16


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
        self._inits: dict[tuple[int, ...], PackedQueuePairInit] = {}
        self._open(self.cq.address)

    def queue_pair_init(self, caps: QueuePairCaps) -> PackedQueuePairInit:
        """Return the arguments of a queue pair that uses this queue for both directions."""
        key = (
            caps.max_send_wr,
            caps.max_recv_wr,
            caps.max_send_sge,
            caps.max_recv_sge,
            caps.max_inline_data,
        )
        init = self._inits.get(key)
        if init is None:
            if len(self._inits) == MAX_INITS:
                self._inits.clear()
            init = PackedQueuePairInit(QueuePairInit(caps, self.cq, self.cq))
            self._inits[key] = init
        return init

    def close(self) -> None:
        """Destroy the queue."""
        self._open(0)
        self.cq.close()
