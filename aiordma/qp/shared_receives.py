"""SharedReceives: the receive buffers that many connections share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.dispatch import KEY_SHIFT, LoopDevice, SharedCompletionQueue
from aiordma.errors import VerbsError
from aiordma.loop import Loop, ensure_called, worker_pool
from aiordma.qp.receive_ring import RECEIVE, ReceiveRing
from aiordma.qp.send_queue import NUMBER_MASK
from aiordma.verbs import Device, SharedReceiveQueue, SharedReceiveQueueCaps

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)

CLOSED_LOOP_SECONDS = 0.1
"""A thread that waits for the loop looks this often whether the loop was closed."""


class ReceiveConsumer(Protocol):
    """A connection that takes from a shared receive queue."""

    def received(self, slot: int, wc: IbvWc) -> None:
        """Handle the completion of a receive of the connection's queue pair."""

    def device_failed(self, error: VerbsError) -> None:
        """End the connection: no completion will come any more."""


class SharedReceives:
    """A shared receive queue of one loop and device, its ring, and its consumers.

    It exists as long as it has users: a listener, and the connections that the listener accepted. A
    completion contains the number of the queue pair that used the buffer. By it, C code finds the
    connection of a message (`CompletionDispatcher.consumers`); a failed receive is handled here.
    """

    def __init__(
        self,
        loop: Loop,
        device: Device,
        depth: int,
        slot_size: int,
        on_failure: Callable[[SharedReceives], None],
    ) -> None:
        """`on_failure` is called when no connection can receive any more."""
        self.ring = ReceiveRing(depth, slot_size)
        self._on_failure = on_failure
        self._loop = loop
        self._loop_device = LoopDevice.of(loop, device)
        self._key = self._loop_device.attach(self)
        self._users = 1
        self._consumers: dict[int, ReceiveConsumer] = {}
        # Connections are made in worker threads, several at once.
        self._lock = threading.Lock()
        self._removed = threading.Condition()
        """Notified when remove() has removed a consumer."""
        self._srq: SharedReceiveQueue | None = None
        self._queue: SharedCompletionQueue

    # --- in a worker thread ---

    def open(self) -> tuple[SharedReceiveQueue, SharedCompletionQueue]:
        """Return the shared receive queue, and the completion queue of all its receives.

        The first call makes them.

        Raises:
            VerbsError: EOPNOTSUPP, EINVAL (the depth exceeds the device's limit), ENOMEM.
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
            ring.post_all(srq, self._key << KEY_SHIFT | RECEIVE)
        except BaseException:
            if srq is not None:
                srq.close()
            ring.close()
            ensure_called(self._loop, lambda: shared.unreserve(queue, ring.slots))
            raise
        self._queue = queue
        return srq

    def add(self, qp_num: int, consumer: ReceiveConsumer, key: int) -> None:
        """Pass the messages of this queue pair to `consumer`, until remove().

        Once LoopDevice.attach_fast_path() was called with its `key`, they go to its ReceiveQueue.
        If an earlier queue pair with this number is not removed yet, wait until it is: completions
        of its messages may be left. siw uses the lowest free number.
        """
        with self._removed:
            while not self._removed.wait_for(
                lambda: qp_num not in self._consumers, CLOSED_LOOP_SECONDS
            ):
                if self._loop.is_closed():
                    break
            self._consumers[qp_num] = consumer
            self._loop_device.dispatcher.consumers[qp_num] = key

    # --- on the loop's thread ---

    def acquire(self) -> None:
        """Add a user."""
        self._users += 1

    def remove(self, qp_num: int, then: Callable[[], None]) -> None:
        """Undo add(), and call `then`: the queue pair is destroyed.

        Its last messages are taken before, see LoopDevice.drain(). So none of them is passed to a
        later queue pair that has the same number.
        """

        def remove_consumer() -> None:
            with self._removed:
                self._consumers.pop(qp_num, None)  # on a closed loop, add() has not waited
                self._loop_device.dispatcher.consumers.pop(qp_num, None)
                self._removed.notify_all()
            then()

        if self._loop.is_closed():  # no completion is polled any more
            remove_consumer()
        else:
            self._loop_device.drain(self._queue, remove_consumer)

    def complete(self, number: int, wc: IbvWc) -> None:
        """Handle a completion. Called by the LoopDevice."""
        slot = number & NUMBER_MASK
        self.ring.completed()
        consumer = self._consumers.get(wc.qp_num)
        if consumer is not None:
            consumer.received(slot, wc)
        else:  # its queue pair is destroyed
            self.repost(slot)

    def repost(self, slot: int) -> None:
        """Post a slot again."""
        try:
            self.ring.post(slot)
        except VerbsError as error:
            self.device_failed(error)

    def device_failed(self, error: VerbsError) -> None:
        """End all connections: the device is removed, or a queue failed, and none can receive."""
        self.ring.stop()
        for consumer in list(self._consumers.values()):
            consumer.device_failed(error)
        self._on_failure(self)

    def release_threadsafe(self) -> None:
        """Remove a user on the loop's thread. Callable from any thread."""
        ensure_called(self._loop, self.release)

    def release(self) -> None:
        """Remove a user. After the last one, everything is destroyed in a worker thread."""
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
                logger.exception("could not destroy a shared receive queue completely")
        ensure_called(self._loop, lambda: self._release_queue(srq is not None))

    def _release_queue(self, was_open: bool) -> None:
        self._loop_device.detach(self._key)
        if was_open:
            self._loop_device.unreserve(self._queue, self.ring.slots)
        self._loop_device.release()
