"""ReceiveRing: the buffers that messages arrive in."""

from __future__ import annotations

from typing import Protocol

from aiordma._native import fast_path
from aiordma.dispatch import MemoryDomain
from aiordma.enums import AccessFlags
from aiordma.errors import VerbsError
from aiordma.memory import AllocatedRegion
from aiordma.qp.send_queue import NUMBER_MASK
from aiordma.rdmacm import IdCalls
from aiordma.verbs import ProtectionDomain, QueuePair

# In the lower half of a wr_id: set for receives, whose slot is in the other bits.
RECEIVE = NUMBER_MASK + 1


class ReceivePoster(Protocol):
    """A queue to which receives are posted: a queue pair, or a shared receive queue."""

    @property
    def cells(self) -> tuple[int, int]:
        """The addresses of the cells with the pointers to the queue pair and the shared queue.

        An address is 0 if there is no such cell.
        """


class ReceiveRing(fast_path.ReceiveRingCore):
    """A ring of equal slots in registered memory. A slot is posted, or it contains a message.

    A slot is posted again when its message is taken. A reader that is too slow delays the peer's
    sends, by the receiver-not-ready (RNR) mechanism of the transport.
    """

    def __init__(self, slots: int, slot_size: int) -> None:
        super().__init__(slots, slot_size)
        self._memory: memoryview
        self._address = self._lkey = 0
        self._region: AllocatedRegion
        """The region that belongs to the ring, if one does."""

    @property
    def has_memory(self) -> bool:
        """True if the slots are in registered memory."""
        return hasattr(self, "_memory")

    def allocate(self, pd: ProtectionDomain) -> None:
        """Allocate and register the memory. Blocks: call it in a worker thread.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        size = self.slots * self.slot_size
        self.use_region(AllocatedRegion(pd, size, AccessFlags.LOCAL_WRITE))

    def use_region(self, region: AllocatedRegion) -> None:
        """Put the slots into `region`, from its beginning."""
        self._region = region
        self.use_part(region, 0)

    def use_part(self, region: AllocatedRegion, start: int) -> None:
        """Put the slots into `region`, from byte `start`. The region does not belong to the ring.

        The caller keeps it registered as long as receives are posted.
        """
        self._memory = region.view[start : start + self.slots * self.slot_size]
        self._address, self._lkey = region.address + start, region.lkey
        self._use(self._memory, self._address, self._lkey)

    def post_all(self, queue: ReceivePoster, first_wr_id: int) -> None:
        """Post every slot to `queue`. Slot n has the wr_id `first_wr_id` + n.

        Raises:
            VerbsError: the device refused one.
        """
        self._open(queue, queue.cells, first_wr_id)
        error = self._post_all()
        if error:
            raise VerbsError(error, "ibv_post_recv")

    def add_post_all(self, calls: IdCalls, queue: QueuePair, first_wr_id: int) -> None:
        """Add to `calls` what post_all() does. All slots are counted as posted at once.

        The completion of a receive can be handled before the end of the calls.
        """
        self._open(queue, queue.cells, first_wr_id)
        self.posted = self.slots
        calls.post_receives(first_wr_id, self._address, self._lkey, self.slots, self.slot_size)

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot, which must not be posted."""
        start = slot * self.slot_size
        return self._memory[start : start + length]

    def completed(self) -> None:
        """Note that a posted slot was completed or flushed."""
        self.posted -= 1

    def stop(self) -> None:
        """Post no more slots: the device would refuse them."""
        self.stopped = True

    def post(self, slot: int) -> None:
        """Post a slot, unless stop() was called.

        Raises:
            VerbsError: the device refused it.
        """
        error = self._post(slot)
        if error:
            raise VerbsError(error, "ibv_post_recv")

    def close(self) -> None:
        """Deregister the memory, if there is any. The queue must be destroyed before."""
        self.stopped = True
        if hasattr(self, "_region"):
            self._region.close()

    def take_from(self, domain: MemoryDomain) -> None:
        """Take memory from a domain. Otherwise as allocate()."""
        self.use_region(domain.pool.take_region(self.slots * self.slot_size))

    def try_take_from(self, domain: MemoryDomain) -> bool:
        """Do what take_from() does, without blocking. Return False if no memory is registered."""
        region = domain.pool.try_take_region(self.slots * self.slot_size)
        if region is not None:
            self.use_region(region)
        return region is not None

    def is_kept_by(self, domain: MemoryDomain) -> bool:
        """Return True if give_back() does not block now."""
        return not hasattr(self, "_region") or domain.pool.keeps(self._region)

    def give_back(self, domain: MemoryDomain) -> None:
        """Give the memory of take_from() back, if there is any. Nothing may use it any more."""
        if hasattr(self, "_region"):
            region = self._region
            del self._region
            domain.pool.give_back(region)

    def free(self) -> None:
        """Free the memory, if there is any. Messages in it read as zeros afterwards."""
        if hasattr(self, "_region"):
            self._region.free()
