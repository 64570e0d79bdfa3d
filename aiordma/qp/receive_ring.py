"""ReceiveRing: the buffers that messages arrive in."""

from __future__ import annotations

from typing import Protocol

from aiordma._native import fast_path
from aiordma.enums import AccessFlags
from aiordma.errors import VerbsError
from aiordma.memory import AllocatedRegion
from aiordma.verbs import ProtectionDomain


class ReceivePoster(Protocol):
    """Where receives are posted: a queue pair, or a shared receive queue."""

    @property
    def cells(self) -> tuple[int, int]:
        """Where a pointer to a queue pair, or to a shared receive queue, is kept: addresses, or 0.

        Without either, each receive is posted by post_recv().
        """

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        """Post one. Raises VerbsError."""


class ReceiveRing(fast_path.ReceiveRingCore):
    """A ring of equal slots in registered memory. A slot belongs to the device, or to a message.

    A slot goes back to the device when its message is taken: a reader that falls behind holds the
    peer's sends back, by the transport's receiver-not-ready.
    """

    def __init__(self, slots: int, slot_size: int) -> None:
        super().__init__(slots, slot_size)
        self._region: AllocatedRegion

    def allocate(self, pd: ProtectionDomain) -> None:
        """Pin the memory. Blocks: in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self.slots * self.slot_size
        self.use_region(AllocatedRegion(pd, size, AccessFlags.LOCAL_WRITE))

    def use_region(self, region: AllocatedRegion) -> None:
        """The slots are there, from its beginning."""
        self._region = region
        self._use(region.view, region.address, region.lkey)

    def post_all(self, queue: ReceivePoster, first_wr_id: int) -> None:
        """Hand every slot to the device; slot n has the wr_id `first_wr_id` + n.

        Raises:
            VerbsError: the device refused.
        """
        self._open(queue, queue.cells, first_wr_id)
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
        self.stopped = True

    def post(self, slot: int) -> None:
        """Give a slot to the device, unless that has been stopped.

        Raises:
            VerbsError: the device refused.
        """
        error = self._post(slot)
        if error:
            raise VerbsError(error, "ibv_post_recv")

    def close(self) -> None:
        """Unpin the memory, if there is any. The queue pair must be destroyed."""
        self.stop()
        if hasattr(self, "_region"):
            self._region.close()
