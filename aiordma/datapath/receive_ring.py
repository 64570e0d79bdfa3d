"""ReceiveRing: the buffers that messages arrive in."""

from __future__ import annotations

from typing import Protocol

from aiordma.enums import AccessFlags
from aiordma.loop import is_forked_child
from aiordma.memory import AllocatedRegion
from aiordma.verbs import ProtectionDomain


class ReceiveQueue(Protocol):
    """Where receives are posted: a queue pair, or a shared receive queue."""

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one. Raises VerbsError."""


class ReceiveRing:
    """A ring of equal slots in registered memory. A slot belongs to the device, or to a message.

    A slot goes back to the device when its message is taken: a reader that falls behind holds the
    peer's sends back, by the transport's receiver-not-ready.
    """

    def __init__(self, slots: int, slot_size: int) -> None:
        self.slots = slots
        self.slot_size = slot_size
        self._first_wr_id = 0
        self._region: AllocatedRegion
        self._queue: ReceiveQueue
        self.posted = 0
        """Receives that the device has not completed, or flushed, yet."""
        self._stopped = False

    def allocate(self, pd: ProtectionDomain) -> None:
        """Pin the memory. Blocks: in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self.slots * self.slot_size
        self._region = AllocatedRegion(pd, size, AccessFlags.LOCAL_WRITE)

    def post_all(self, queue: ReceiveQueue, first_wr_id: int) -> None:
        """Hand every slot to the device; slot n has the wr_id `first_wr_id` + n.

        Raises:
            VerbsError: the device refused.
        """
        self._queue, self._first_wr_id = queue, first_wr_id
        self.posted, self._stopped = 0, False  # it may be the second attempt
        for slot in range(self.slots):
            self.post(slot)

    def view(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot, which must not be the device's."""
        start = slot * self.slot_size
        return self._region.view[start : start + length]

    def completed(self) -> None:
        """The device gave a slot back, filled or not."""
        self.posted -= 1

    def stop(self) -> None:
        """Give the device no more slots: it would take them no more."""
        self._stopped = True

    def post(self, slot: int) -> None:
        """Give a slot to the device, unless that has been stopped.

        Raises:
            VerbsError: the device refused.
        """
        if self._stopped or is_forked_child():
            return
        region = self._region
        address = region.address + slot * self.slot_size
        # Counted first: the device may give it back before this returns, in another thread.
        self.posted += 1
        try:
            self._queue.post_recv(self._first_wr_id + slot, address, self.slot_size, region.lkey)
        except BaseException:
            self.posted -= 1
            raise

    def close(self) -> None:
        """Unpin the memory, if there is any. The queue pair must be destroyed."""
        self.stop()
        if hasattr(self, "_region"):
            self._region.close()
