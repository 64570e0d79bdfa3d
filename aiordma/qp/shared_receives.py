"""SharedReceives: receive buffers that many connections take from."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from aiordma.dispatch import KEY_SHIFT, LoopDevice, SharedQueue
from aiordma.errors import VerbsError
from aiordma.loop import Loop, hand_over, workers
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.send_queue import NUMBER_MASK
from aiordma.verbs import Device, SharedReceiveQueue, SharedReceiveQueueCaps

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)


class Taker(Protocol):
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
        self._shared = LoopDevice.of(loop, device)
        self._key = self._shared.attach(self)
        self._users = 1
        self._takers: dict[int, Taker] = {}
        # Connections are made in worker threads, several at once.
        self._lock = threading.Lock()
        self._srq: SharedReceiveQueue | None = None
        self._queue: SharedQueue

    # --- in a worker thread ---

    def open(self) -> tuple[SharedReceiveQueue, SharedQueue]:
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
        shared, ring = self._shared, self.ring
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
            hand_over(self._loop, lambda: shared.unreserve(queue, ring.slots))
            raise
        self._queue = queue
        return srq

    def add(self, qp_num: int, taker: Taker) -> None:
        """What this queue pair receives is `taker`'s, until remove()."""
        self._takers[qp_num] = taker

    # --- on the loop's thread ---

    def use(self) -> None:
        """One user more."""
        self._users += 1

    def remove(self, qp_num: int, taker: Taker) -> None:
        """The queue pair is destroyed."""
        if self._takers.get(qp_num) is taker:
            del self._takers[qp_num]

    def complete(self, number: int, wc: IbvWc) -> None:
        """Take a completion from the dispatcher."""
        slot = number & NUMBER_MASK
        self.ring.completed()
        taker = self._takers.get(wc.qp_num)
        if taker is not None:
            taker.received(slot, wc)
        else:  # of one that is destroyed
            self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """A slot is free again."""
        try:
            self.ring.post(slot)
        except VerbsError as error:
            self.device_failed(error)

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone, or the queue is broken: no connection can receive any more."""
        self.ring.stop()
        for taker in list(self._takers.values()):
            taker.device_failed(error)

    def release(self) -> None:
        """One user less. With the last one all is destroyed, in a worker thread."""
        self._users -= 1
        if not self._users:
            self.ring.stop()
            workers.submit(self._destroy)

    def _destroy(self) -> None:
        srq, self._srq = self._srq, None
        if srq is not None:
            try:
                srq.close()
                self.ring.close()
            except VerbsError:
                logger.exception("a shared receive queue was not cleaned up whole")
        hand_over(self._loop, lambda: self._let_go(srq is not None))

    def _let_go(self, was_open: bool) -> None:
        self._shared.detach(self._key)
        if was_open:
            self._shared.unreserve(self._queue, self.ring.slots)
        self._shared.release()
