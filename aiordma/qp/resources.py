"""QueuePairResources: the objects of its loop's device that a queue pair uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId
from aiordma.dispatch import (
    KEY_SHIFT,
    CompletionHandler,
    LoopDevice,
    MemoryDomain,
    OwnDomain,
    SharedCompletionQueue,
)
from aiordma.loop import call_threadsafe
from aiordma.qp.receive_ring import RECEIVE, ReceiveRing
from aiordma.qp.send_queue import SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.rdmacm import IdCalls
from aiordma.verbs import AsyncEvent, QueuePair, QueuePairCaps, QueuePairInit

if TYPE_CHECKING:
    from aiordma._native._fast_path import ReceiveQueue, SendQueueCore, StreamDataPathCore


class QueuePairResources:
    """A key for the work requests of an id's queue pair, and entries in a shared completion queue.

    They are released with the id, when the queue pair is destroyed, or if it could not be made.
    Until then the table of the LoopDevice refers to the handler of the completions. So the memory
    that the device uses stays allocated even if the user drops every reference.
    """

    def __init__(
        self,
        cm: AsyncCmId,
        callbacks: CompletionHandler,
        caps: QueuePairCaps,
        late: int = 0,
        *,
        own_domain: bool = False,
    ) -> None:
        """`late`: requests that can complete after their send credits were used again.

        `own_domain`: True for a protection domain of its own.
        """
        loop, device = cm.handle.loop, cm.device()
        self.loop_device = LoopDevice.of(loop, device)
        self.domain: MemoryDomain = (
            OwnDomain(loop, device) if own_domain else self.loop_device.acquire()
        )
        """The protection domain of the queue pair and of its memory."""
        cm.handle.add_released_callback(self._release)
        self.send_cq: SharedCompletionQueue
        """The completion queue of the send queue, once the queue pair is made."""
        self.recv_cq: SharedCompletionQueue
        """The completion queue of the receives, once the queue pair is made."""
        self.key = self.loop_device.attach(callbacks)
        """The upper half of the wr_ids."""
        self._cm = cm
        self._caps = caps
        self._entries = caps.max_send_wr + caps.max_recv_wr + late

    def open(self) -> MemoryDomain:
        """Reserve completion queue entries, and return the protection domain.

        Called before the queue pair is made. Blocks: call it in a worker thread.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        if not hasattr(self, "send_cq"):
            self.send_cq = self.recv_cq = self.loop_device.reserve(self._entries)
        self.domain.open()
        return self.domain

    def make_qp(self, ring: ReceiveRing, sends: SendQueue) -> QueuePair:
        """Make the queue pair and post all receives. Blocks: call it in a worker thread.

        The lower half of a wr_id is a number of `sends`, or RECEIVE and a slot of `ring`. If the
        ring has no memory yet, it gets some from the protection domain's pool.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        domain = self.open()
        if not ring.has_memory:
            ring.take_from(domain)
        cq = self.send_cq.cq
        qp = self._make(QueuePairInit(self._caps, cq, cq), sends)
        ring.post_all(qp, self._first_receive())
        return qp

    def _first_receive(self) -> int:
        """Return the wr_id of the receive of slot 0."""
        return self.key << KEY_SHIFT | RECEIVE

    def add_qp(self, calls: IdCalls, ring: ReceiveRing, sends: SendQueue) -> QueuePair | None:
        """Add to `calls` what make_qp() does. Return the queue pair, which is not made yet.

        Return None, and add nothing, if it needs calls that block: it has no completion queue or no
        memory yet. Does not block.
        """
        if not (self.loop_device.is_reading and self._try_open(ring)):
            return None
        qp = calls.create_qp(self.send_cq.queue_pair_init(self._caps), self.domain.pd)
        sends.open(qp, self.domain.pool, self.key << KEY_SHIFT)
        ring.add_post_all(calls, qp, self._first_receive())
        return qp

    def _try_open(self, ring: ReceiveRing) -> bool:
        """Do what make_qp() does before it makes the queue pair. Return False if it would block."""
        if not self.domain.is_open:
            return False
        if not hasattr(self, "send_cq"):
            queue = self.loop_device.try_reserve(self._entries)
            if queue is None:
                return False
            self.send_cq = self.recv_cq = queue
        # The memory comes last: it is given back only if the queue pair is prepared.
        return ring.has_memory or ring.try_take_from(self.domain)

    def make_srq_qp(self, receives: SharedReceives, sends: SendQueue) -> QueuePair:
        """Make a queue pair that takes its receives from a shared receive queue. See make_qp()."""
        self.send_cq = queue = self.loop_device.reserve(self._entries)
        srq, self.recv_cq = receives.open()
        return self._make(QueuePairInit(self._caps, queue.cq, self.recv_cq.cq, srq), sends)

    def _make(self, init: QueuePairInit, sends: SendQueue) -> QueuePair:
        qp = self._cm.make_qp(init, self.domain.pd)
        sends.open(qp, self.domain.pool, self.key << KEY_SHIFT)
        # Read completions from now on: data can arrive before the peer's confirmation, or instead
        # of a lost one.
        if not self.loop_device.is_reading:
            call_threadsafe(self._cm.loop, self.loop_device.start_reading)
        return qp

    def attach_fast_path(
        self,
        sends: SendQueueCore,
        receives: ReceiveQueue | StreamDataPathCore,
        on_notified: Callable[[], None],
    ) -> None:
        """Let the fast path take the completions first: see LoopDevice.attach_fast_path."""
        self.loop_device.attach_fast_path(self.key, sends, receives, on_notified)

    def watch(self, qp: QueuePair, handler: Callable[[AsyncEvent], None]) -> None:
        """Call `handler` on the loop with the asynchronous events of the queue pair."""
        self.loop_device.queue_pairs.add(self.key, qp, self.send_cq.cq, handler)

    def drain(self, then: Callable[[], None]) -> None:
        """Take all completions, those of receives last, then call `then`: see LoopDevice.drain."""
        if not hasattr(self, "recv_cq"):  # the peer can disconnect before the queue pair is made
            then()
            return
        if self.send_cq is not self.recv_cq:
            self.loop_device.drain(self.send_cq)
        self.loop_device.drain(self.recv_cq, then)

    def _release(self) -> None:
        self.loop_device.detach(self.key)
        if hasattr(self, "send_cq"):
            self.loop_device.unreserve(self.send_cq, self._entries)
        self.domain.release()
        self.loop_device.release()
