"""LoopDevice: what the connections of one loop on one device share; completions to their owners."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from aiordma._native import fast_path
from aiordma.dispatch.completion_reader import POLL_BATCH, CompletionReader
from aiordma.dispatch.device_events import DeviceSubscription
from aiordma.dispatch.queue_pair_events import QueuePairEvents
from aiordma.enums import AsyncEventType
from aiordma.errors import VerbsError
from aiordma.loop import Loop, LoopTimeBudget, call_threadsafe, run_with_inline_wakeups, worker_pool
from aiordma.memory import BufferPool
from aiordma.rdmacm import device_contexts
from aiordma.verbs import AsyncEvent, CompletionChannel, CompletionQueue, Device, ProtectionDomain

if TYPE_CHECKING:
    from aiordma._native._fast_path import ReceiveQueue, SendQueueCore
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)

CQ_ENTRIES = 4096
# libsiw takes the mmap offset 0x90000 for an error, and so fails to make any queue pair once that
# offset's turn comes (every version up to rdma-core 65). A queue of this length lies across it.
IWARP_CQ_ENTRIES = 1 << 15
# After so many batches from one queue the loop gets a turn before the next.
MAX_BATCHES = 16

# A wr_id is the key of the completion's owner above these bits, and the owner's own number in them.
KEY_SHIFT = fast_path.KEY_SHIFT
LOW_BITS = (1 << KEY_SHIFT) - 1


class CompletionHandler(Protocol):
    """The owner of work requests."""

    def complete(self, number: int, wc: IbvWc) -> None:
        """One of them ended. `wc` is overwritten afterwards. Must not block."""

    def device_failed(self, error: VerbsError) -> None:
        """No completion will come any more: the device is gone."""


class SharedCompletionQueue:
    """A completion queue and how many of its entries are promised to queue pairs.

    No more are promised than it has, so it cannot overflow, which would break all of them.
    """

    def __init__(self, channel: CompletionChannel, entries: int) -> None:
        self.cq = CompletionQueue(channel, entries)
        self.free = self.cq.capacity
        self.is_armed = False
        """Whether the next completion raises an event."""
        self.pollers = 0
        """Tasks that poll, and need no event."""
        self.is_arming_scheduled = False
        """Whether the loop will look at that in its next turn."""

    def close(self) -> None:
        self.cq.close()


class LoopDevice:
    """A protection domain, a buffer pool, a completion channel and the completion queues behind it.

    Made with the first connection of a loop on a device, closed with the last. The C objects come
    with the first reserve(), in a worker thread.
    """

    def __init__(self, loop: Loop, device: Device) -> None:
        self.device = device
        self.pd: ProtectionDomain
        self.pool: BufferPool
        self._loop = loop
        self._lock = threading.Lock()  # guards what worker threads make: all but sinks and users
        self.queue_pairs = QueuePairEvents()
        self._events: DeviceSubscription | None = None
        self._has_context = False
        self._channel: CompletionChannel | None = None
        self._reader = CompletionReader(self._dispatch_pending)
        self.dispatcher = self._reader.dispatcher
        """What the connections poll themselves."""
        self.budget = LoopTimeBudget(loop, self.dispatcher)
        self._queues: dict[int, SharedCompletionQueue] = {}
        self._sinks: dict[int, CompletionHandler] = {}
        self._on_notified: dict[int, Callable[[], None]] = {}
        self._keys = itertools.count(1)
        self._users = 0
        self._reading = False
        self._failed = False

    @classmethod
    def of(cls, loop: Loop, device: Device) -> LoopDevice:
        """The LoopDevice of `device` on `loop`, made if need be, with one user more."""
        devices = _loop_devices.setdefault(loop, {})
        shared = devices.get(device)
        if shared is None:
            shared = devices[device] = cls(loop, device)
        shared._users += 1
        return shared

    # --- in a worker thread ---

    def reserve(self, entries: int) -> SharedCompletionQueue:
        """A completion queue with `entries` entries promised to the caller. Makes system calls.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
            DeviceRemoved: the device is gone.
        """
        with self._lock:
            if self._channel is None:
                self._open()
            for queue in self._queues.values():
                if queue.free >= entries:
                    break
            else:
                queue = self._add_queue(entries)
            queue.free -= entries
            return queue

    def _open(self) -> None:
        # Should a step fail, those before it are not repeated: close() finds what there is.
        if not self._has_context:
            device_contexts.acquire(self.device)
            self._has_context = True
        self._events = DeviceSubscription(self._loop, self.device, self._on_device_event)
        if not hasattr(self, "pd"):
            self.pd = ProtectionDomain(self.device)
            self.pool = BufferPool(self._loop, self.pd)
        self._channel = CompletionChannel(self.device)

    def _add_queue(self, entries: int) -> SharedCompletionQueue:
        assert self._channel is not None
        limit = self.device.attributes.max_cqe
        if entries > limit:
            name = self.device.name
            raise ValueError(f"{name} allows a send_depth and recv_depth of {limit} together")
        usual = IWARP_CQ_ENTRIES if self.device.is_iwarp else CQ_ENTRIES
        wanted = min(max(entries, usual), limit)
        queue = SharedCompletionQueue(self._channel, wanted)
        self._queues[queue.cq.address] = queue
        queue.cq.request_notify()
        queue.is_armed = True
        return queue

    def _close(self) -> None:
        with self._lock:
            steps = [queue.close for queue in self._queues.values()]
            if self._channel is not None:
                steps.append(self._channel.close)
            if hasattr(self, "pd"):
                steps += [self.pool.close, self.pd.close]
            for step in steps:
                try:
                    step()
                except VerbsError:
                    logger.exception("%s was not cleaned up whole", self.device.name)
            if self._has_context:
                device_contexts.release([self.device])

    # --- on the loop's thread ---

    def attach(self, handler: CompletionHandler) -> int:
        """Return the key for the wr_ids of `handler`, which gets their completions from now on.

        It is held, and all it owns, until detach(): the device may be writing there.
        """
        key = next(self._keys)
        self._sinks[key] = handler
        return key

    def attach_fast_path(
        self,
        key: int,
        sends: SendQueueCore,
        receives: ReceiveQueue,
        on_notified: Callable[[], None],
    ) -> None:
        """What the requests with this key say goes there first, in C, until detach().

        The handler gets the other completions. `on_notified` is called when there is pending work;
        it must not block. Callable from any thread.
        """
        self._on_notified[key] = on_notified
        self._reader.attach(key, sends, receives)

    def start_reading(self) -> None:
        """Have the loop watch for completions; after the first reserve()."""
        if not self._reading and self._channel is not None:
            self._reading = True
            self._loop.add_reader(self._channel.fd, self._on_readable)
            if self._events is not None:
                self._events.start()

    def detach(self, key: int) -> None:
        """No more completions for this sink: its queue pair is destroyed."""
        self._sinks.pop(key, None)
        self._reader.detach(key)
        self._on_notified.pop(key, None)
        self.queue_pairs.remove(key)

    def unreserve(self, queue: SharedCompletionQueue, entries: int) -> None:
        """Take a promise back: the queue pair is destroyed.

        What it left in the queue is polled first, or else the queue could still overflow.
        """

        def take_back() -> None:
            with self._lock:
                queue.free += entries

        if self._loop.is_closed():  # no more will come, and nobody could hear of it
            take_back()
        else:
            self.drain(queue, take_back)

    def release(self) -> None:
        """One user less. With the last one everything is closed, in a worker thread."""
        self._users -= 1
        if self._users:
            return
        devices = _loop_devices.get(self._loop, {})
        if devices.get(self.device) is self:
            del devices[self.device]
        self._stop_reading()
        if self._events is not None:
            self._events.stop()
        worker_pool.submit(self._close)

    def _stop_reading(self) -> None:
        if self._reading and self._channel is not None:
            self._reading = False
            with suppress(RuntimeError):  # a closed loop watches nothing any more
                self._loop.remove_reader(self._channel.fd)

    def _on_readable(self) -> None:
        assert self._channel is not None
        try:
            # One event a turn: while there are more, the descriptor stays readable.
            address = self._reader.event(self._channel)
        except VerbsError as error:
            self._fail(error)
            return
        queue = self._queues.get(address)
        if queue is not None:
            queue.is_armed = False
            # What is there first, and the tasks that it is for: arming can wait until they sleep.
            run_with_inline_wakeups(self._poll_batch, queue)
            run_with_inline_wakeups(self._arm_again, queue)

    def _arm_and_drain(self, queue: SharedCompletionQueue) -> None:
        """Armed before polled: what comes between the two raises a new event, and none is missed.

        Not armed while a task polls: an event is a system call for each message, and one more to
        arm it. See polled().
        """
        if not queue.pollers:
            try:
                self._reader.arm(queue.cq)
            except VerbsError as error:
                self._fail(error)
                return
            queue.is_armed = True
        if self._poll_batch(queue) >= POLL_BATCH:
            self.drain(queue)

    def stop_polling(self, queue: SharedCompletionQueue) -> None:
        """A task polls no more. If nobody else does, the queue is armed before the loop sleeps."""
        queue.pollers -= 1
        if not (queue.pollers or queue.is_armed or queue.is_arming_scheduled):
            queue.is_arming_scheduled = True
            with suppress(RuntimeError):  # on a closed loop nobody waits for an event
                self._loop.call_soon(lambda: run_with_inline_wakeups(self._arm_again, queue))

    def _arm_again(self, queue: SharedCompletionQueue) -> None:
        queue.is_arming_scheduled = False
        if self._reading and not (queue.pollers or queue.is_armed):
            self._arm_and_drain(queue)

    def drain(self, queue: SharedCompletionQueue, then: Callable[[], None] = lambda: None) -> None:
        """Poll until empty: the queue is armed, so that what comes later raises an event.

        Calls `then` when it is empty, which may be after a turn of the loop. Not to be called from
        a sink's complete().
        """
        for _ in range(MAX_BATCHES):
            if self._poll_batch(queue) < POLL_BATCH:
                then()
                return
        call_threadsafe(self._loop, lambda: run_with_inline_wakeups(self._drain_on, queue, then))

    def _poll_batch(self, queue: SharedCompletionQueue) -> int:
        """Take a batch, and say how many there were."""
        if self._failed:
            return 0
        try:
            return self._reader.poll(queue.cq)
        except VerbsError as error:
            self._fail(error)
            return 0

    def poll_for(self, queue: SharedCompletionQueue, nanoseconds: int) -> None:
        """Take the next completions as they come, for so long at most; the thread does no other.

        Not to be called from a sink's complete().
        """
        if self._failed:
            return
        try:
            self._reader.poll_for(queue.cq, nanoseconds)
        except VerbsError as error:
            self._fail(error)

    def _dispatch_pending(self) -> None:
        """Pass on what is for Python of a batch. Called in the middle of polling."""
        sinks = self._sinks
        for wc in self._reader.pending():
            wr_id = wc.wr_id
            handler = sinks.get(wr_id >> KEY_SHIFT)
            if handler is not None:
                handler.complete(wr_id & LOW_BITS, wc)
        for key in self._reader.notified():
            on_notified = self._on_notified.get(key)
            if on_notified is not None:
                on_notified()

    def _drain_on(self, queue: SharedCompletionQueue, then: Callable[[], None]) -> None:
        if self._reading:
            self.drain(queue, then)
        else:
            then()

    def _on_device_event(self, event: AsyncEvent) -> None:
        if event.type is not AsyncEventType.DEVICE_FATAL:
            self.queue_pairs.dispatch(event)
        elif not self._failed:
            self._fail(VerbsError(errno.ENODEV, "ibv_get_async_event"))

    def _fail(self, error: VerbsError) -> None:
        """Give up on the device, whose fd would stay readable for ever."""
        logger.warning("%s: %s", self.device.name, error)
        self._failed = True
        self._stop_reading()
        for handler in list(self._sinks.values()):
            try:
                handler.device_failed(error)
            except Exception:  # the others must hear of it too
                logger.exception("could not handle the failure of %s", self.device.name)


_loop_devices: WeakKeyDictionary[Loop, dict[Device, LoopDevice]] = WeakKeyDictionary()
