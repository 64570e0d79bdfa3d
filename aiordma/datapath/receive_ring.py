"""ReceiveRing: the buffers that messages arrive in, and the messages that have arrived."""

from __future__ import annotations

from collections import deque

from aiordma.enums import AccessFlags
from aiordma.memory import AllocatedRegion
from aiordma.verbs import ProtectionDomain, QueuePair


class ReceiveRing:
    """A ring of equal slots in registered memory. A slot belongs to the device, or to a message.

    A slot goes back to the device when its message is taken: a reader that falls behind holds the
    peer's sends back, by the transport's receiver-not-ready.
    """

    def __init__(self, slots: int, slot_size: int) -> None:
        self._slots = slots
        self._slot_size = slot_size
        self._first_wr_id = 0
        self._region: AllocatedRegion
        self._qp: QueuePair
        self._messages: deque[tuple[int, int]] = deque()
        self.posted = 0
        """Receives that the device has not completed, or flushed, yet."""

    def __len__(self) -> int:
        """Messages that have arrived and are not taken."""
        return len(self._messages)

    def allocate(self, pd: ProtectionDomain) -> None:
        """Pin the memory. Blocks: in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self._slots * self._slot_size
        self._region = AllocatedRegion(pd, size, AccessFlags.LOCAL_WRITE)

    def post_all(self, qp: QueuePair, first_wr_id: int) -> None:
        """Hand every slot to the device; slot n has the wr_id `first_wr_id` + n.

        Raises:
            VerbsError: the device refused.
        """
        self._qp, self._first_wr_id = qp, first_wr_id
        region = self._region
        self.posted = self._slots
        qp.post_recvs(first_wr_id, region.address, self._slot_size, self._slots, region.lkey)

    def arrived(self, slot: int, length: int) -> None:
        """The device filled a slot with a message of `length` bytes."""
        self.posted -= 1
        self._messages.append((slot, length))

    def flushed(self) -> None:
        """The device gave a slot back unused."""
        self.posted -= 1

    def take(self) -> tuple[int, bytes]:
        """The oldest message, copied out, and the slot that it leaves, to be posted again."""
        slot, length = self._messages.popleft()
        start = slot * self._slot_size
        return slot, bytes(self._region.view[start : start + length])

    def post(self, slot: int) -> None:
        """Give a slot to the device.

        Raises:
            VerbsError: the device refused.
        """
        region = self._region
        address = region.address + slot * self._slot_size
        self._qp.post_recv(self._first_wr_id + slot, address, self._slot_size, region.lkey)
        self.posted += 1

    def close(self) -> None:
        """Unpin the memory. The queue pair must be destroyed."""
        self._region.close()
