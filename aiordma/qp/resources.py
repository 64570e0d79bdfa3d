"""Berth: where a queue pair lives on its loop's device."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId
from aiordma.dispatch import KEY_SHIFT, CompletionSink, LoopDevice, SharedQueue
from aiordma.errors import DeviceRemoved, RdmaError, VerbsError
from aiordma.loop import post
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.send_queue import NUMBER_MASK, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.verbs import AsyncEvent, QueuePair, QueuePairCaps, QueuePairInit

if TYPE_CHECKING:
    from aiordma._native._fast_path import Arrivals, SendLane

# In the lower half of a wr_id: set for receives, whose slot is in the other bits.
RECEIVE = NUMBER_MASK + 1


def removal(error: VerbsError) -> RdmaError:
    """What ends an owner whose device gave this error: DeviceRemoved if that is what it means."""
    if error.errno in (errno.EIO, errno.ENODEV):
        return DeviceRemoved(f"the RDMA device was removed: {error}")
    return error


class Berth:
    """A key for the work requests of an id's queue pair, and room for them in a shared queue.

    Their owner is held by the device's table from the beginning until release(), so that no memory
    under the device depends on what users keep.
    """

    def __init__(
        self, cm: AsyncCmId, owner: CompletionSink, caps: QueuePairCaps, late: int = 0
    ) -> None:
        """`late`: requests that may end when their places in the send queue are others' already."""
        self.shared = LoopDevice.of(cm.loop, cm.device())
        self.queue: SharedQueue
        """Where the requests complete, once the queue pair is made."""
        self.receive_queue: SharedQueue
        """Where the receives do."""
        self._cm = cm
        self._caps = caps
        self._entries = caps.max_send_wr + caps.max_recv_wr + late
        self._key = self.shared.attach(owner)

    def open(self) -> LoopDevice:
        """Have room, and a protection domain, before the queue pair. Blocks: in a worker thread.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        if not hasattr(self, "queue"):
            self.queue = self.receive_queue = self.shared.reserve(self._entries)
        return self.shared

    def make_qp(self, ring: ReceiveRing, sends: SendQueue) -> QueuePair:
        """Make the queue pair and post all receives. Blocks: in a worker thread.

        The completions of `sends` have their numbers, those of the ring their slots and RECEIVE.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        ring.allocate(self.open().pd)
        self._cm.handle.on_destroyed(ring.close)
        cq = self.queue.cq
        qp = self._make(QueuePairInit(self._caps, cq, cq), sends)
        ring.post_all(qp, self._key << KEY_SHIFT | RECEIVE)
        return qp

    def make_sharing_qp(self, receives: SharedReceives, sends: SendQueue) -> QueuePair:
        """Likewise, for a queue pair whose receives are those of a shared receive queue."""
        self.queue = queue = self.shared.reserve(self._entries)
        srq, self.receive_queue = receives.open()
        return self._make(QueuePairInit(self._caps, queue.cq, self.receive_queue.cq, srq), sends)

    def _make(self, init: QueuePairInit, sends: SendQueue) -> QueuePair:
        shared = self.shared
        qp = self._cm.make_qp(init, shared.pd)
        sends.open(qp, shared.pool, self._key << KEY_SHIFT)
        # From now on: data can come before a peer's confirmation, and in place of a lost one.
        post(self._cm.loop, shared.start_reading)
        return qp

    def take_lanes(self, sends: SendLane, arrivals: Arrivals, look: Callable[[], None]) -> None:
        """What the requests say goes there first: see LoopDevice.take_lanes."""
        self.shared.take_lanes(self._key, sends, arrivals, look)

    def watch(self, qp: QueuePair, tell: Callable[[AsyncEvent], None]) -> None:
        """Have the loop call `tell` with the device's events of the queue pair, until release()."""
        self.shared.queue_pairs.add(self._key, qp, self.queue.cq, tell)

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`: see LoopDevice.drain."""
        if hasattr(self, "receive_queue"):
            self.shared.drain(self.receive_queue, then)

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.shared.detach(self._key)
        if hasattr(self, "queue"):
            self.shared.unreserve(self.queue, self._entries)
        self.shared.release()
