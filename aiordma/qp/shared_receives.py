"""SharedReceives: receive buffers that many connections take from."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from aiordma.dispatch import KEY_SHIFT, LoopDevice, SharedCompletionQueue
from aiordma.errors import VerbsError
from aiordma.loop import Loop, ensure_called, worker_pool
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.send_queue import NUMBER_MASK
from aiordma.verbs import Device, SharedReceiveQueue, SharedReceiveQueueCaps

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)


class ReceiveConsumer(Protocol):
    """A connection that takes from a shared receive queue."""

    def received(self, slot: int, wc: IbvWc) -> None:
        """A receive of its queue pair ended."""

    def device_failed(self, error: VerbsError) -> None:
        """No completion will come any more."""


class SharedReceives:
    """A shared receive queue of one loop and device, its ring, and who takes from it.

    Lives as long as it has users: a listener, and the connections that it accepted. Completions
    name the queue pair that took the buffer.
    """

    def __init__(self, loop: Loop, device: Device, depth: int, slot_size: int) -> None:
        self.ring = ReceiveRing(depth, slot_size)
        self._loop = loop
        self._loop_device = LoopDevice.of(loop, device)
        self._key = self._loop_device.attach(self)
        self._users = 1
        self._consumers: dict[int, ReceiveConsumer] = {}
        # Connections are made in worker threads, several at once.
        self._lock = threading.Lock()
        self._srq: SharedReceiveQueue | None = None
        self._queue: SharedCompletionQueue

    # --- in a worker thread ---

    def open(self) -> tuple[SharedReceiveQueue, SharedCompletionQueue]:
        """The shared receive queue, and the completion queue of all that take from it.

        Made when it is needed first.

        Raises:
            VerbsError: EOPNOTSUPP, EINVAL (deeper than the device can), ENOMEM.
        """
        with self._lock:
            if self._srq is None:
                self._srq = self._make()
            return self._srq, self._queue

    def _make(self) -> SharedReceiveQueue:
        shared, ring = self._loop_device, self.ring
        queue = shared.reserve(ring.slots)
        srq = None
        try:
            ring.allocate(shared.pd)
            srq = SharedReceiveQueue.create(shared.pd, SharedReceiveQueueCaps(max_wr=ring.slots))
            ring.post_all(srq, self._key << KEY_SHIFT)
        except BaseException:
            if srq is not None:
                srq.close()
            ring.close()
            ensure_called(self._loop, lambda: shared.unreserve(queue, ring.slots))
            raise
        self._queue = queue
        return srq

    def add(self, qp_num: int, consumer: ReceiveConsumer) -> None:
        """What this queue pair receives is `taker`'s, until remove()."""
        self._consumers[qp_num] = consumer

    # --- on the loop's thread ---

    def acquire(self) -> None:
        """One user more."""
        self._users += 1

    def remove(self, qp_num: int, consumer: ReceiveConsumer) -> None:
        """The queue pair is destroyed."""
        if self._consumers.get(qp_num) is consumer:
            del self._consumers[qp_num]

    def complete(self, number: int, wc: IbvWc) -> None:
        """Take a completion from the dispatcher."""
        slot = number & NUMBER_MASK
        self.ring.completed()
        taker = self._consumers.get(wc.qp_num)
        if taker is not None:
            taker.received(slot, wc)
        else:  # of one that is destroyed
            self.repost(slot)

    def repost(self, slot: int) -> None:
        """A slot is free again."""
        try:
            self.ring.post(slot)
        except VerbsError as error:
            self.device_failed(error)

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone, or the queue is broken: no connection can receive any more."""
        self.ring.stop()
        for taker in list(self._consumers.values()):
            taker.device_failed(error)

    def release(self) -> None:
        """One user less. With the last one all is destroyed, in a worker thread."""
        self._users -= 1
        if not self._users:
            self.ring.stop()
            worker_pool.submit(self._destroy)

    def _destroy(self) -> None:
        srq, self._srq = self._srq, None
        if srq is not None:
            try:
                srq.close()
                self.ring.close()
            except VerbsError:
                logger.exception("a shared receive queue was not cleaned up whole")
        ensure_called(self._loop, lambda: self._release_queue(srq is not None))

    def _release_queue(self, was_open: bool) -> None:
        self._loop_device.detach(self._key)
        if was_open:
            self._loop_device.unreserve(self._queue, self.ring.slots)
        self._loop_device.release()
