"""LoopDevice: the resources that the connections of one loop on one device share.

It dispatches the completions of these connections to their handlers.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from aiordma.dispatch.completion_reader import POLL_BATCH, CompletionHandler, CompletionReader
from aiordma.dispatch.deferred_arming import DeferredArming
from aiordma.dispatch.device_events import DeviceSubscription
from aiordma.dispatch.queue_pair_events import QueuePairEvents
from aiordma.dispatch.shared_completion_queue import SharedCompletionQueue
from aiordma.enums import AsyncEventType
from aiordma.errors import VerbsError
from aiordma.loop import (
    Loop,
    LoopTimeBudget,
    call_threadsafe,
    run_with_inline_wakeups,
    scheduled_count,
    worker_pool,
)
from aiordma.memory import BufferPool, PartPool
from aiordma.rdmacm import device_contexts
from aiordma.verbs import AsyncEvent, CompletionChannel, Device, ProtectionDomain
from aiordma.verbs.offset_guard import offset_guards

if TYPE_CHECKING:
    from aiordma._native._fast_path import ReceiveQueue, SendQueueCore, StreamDataPathCore

logger = logging.getLogger(__name__)

CQ_ENTRIES = 4096
# The number of entries of destroyed queue pairs that are made free together, after one poll.
RELEASE_BATCH = 64
# drain() yields to the loop after this number of batches from one queue.
MAX_BATCHES = 16


class LoopDevice:
    """A protection domain, a buffer pool, a completion channel and its completion queues.

    It is created with the first connection of a loop on a device, and closed with the last one. The
    first reserve() creates the C objects, in a worker thread.
    """

    def __init__(self, loop: Loop, device: Device) -> None:
        self.device = device
        self.pd: ProtectionDomain
        self.pool: BufferPool
        self.parts: PartPool
        self.largest_region = 0
        """The length in bytes of the largest region that was ever registered here."""
        self._loop = loop
        # Guards the attributes that worker threads change, not _handlers and _users.
        self._lock = threading.Lock()
        self.queue_pairs = QueuePairEvents()
        self._events = DeviceSubscription(loop, device, self._on_device_event)
        self._has_context = False
        self._has_guard = False
        self._channel: CompletionChannel | None = None
        self._reader = CompletionReader(self._dispatch_pending, self._on_failure, self.drain)
        self.dispatcher = self._reader.dispatcher
        """The C object that connections poll directly."""
        self.budget = LoopTimeBudget(loop, self.dispatcher)
        self._deferred_arming = DeferredArming(loop, self.dispatcher)
        self._queues: dict[int, SharedCompletionQueue] = self.dispatcher.queues
        self._handlers: dict[int, CompletionHandler] = {}
        self._on_notified: dict[int, Callable[[], None]] = {}
        self._keys = itertools.count(1)
        self._users = 0
        self.is_reading = False
        """True if the loop watches the completion channel."""
        self._failed = False

    @classmethod
    def of(cls, loop: Loop, device: Device) -> LoopDevice:
        """Return the LoopDevice of `device` on `loop` and add one user. The first call creates it.

        One that has failed is replaced. Its users keep it. Each user calls release() once.
        """
        devices = _loop_devices.setdefault(loop, {})
        loop_device = devices.get(device)
        if loop_device is None or loop_device._failed:
            loop_device = devices[device] = cls(loop, device)
        return loop_device.acquire()

    def acquire(self) -> LoopDevice:
        """Add a user, and return self."""
        self._users += 1
        return self

    # --- in a worker thread ---

    def open(self) -> None:
        """Open the device, and make the protection domain and the completion channel. Idempotent.

        Raises:
            VerbsError: the device does not allow it.
            DeviceRemoved: the device was removed.
        """
        with self._lock:
            if self._channel is None:
                self._open()

    def reserve(self, entries: int) -> SharedCompletionQueue:
        """Reserve `entries` entries of a completion queue, and return the queue.

        The caller undoes it with unreserve(). Makes system calls.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
            DeviceRemoved: the device was removed.
            ValueError: `entries` exceeds the limit of the device.
        """
        with self._lock:
            if self._channel is None:
                self._open()
            return self._take_entries(entries) or self._add_queue(entries)

    def _take_entries(self, entries: int) -> SharedCompletionQueue | None:
        for queue in self._queues.values():
            if queue.free >= entries:
                queue.free -= entries
                return queue
        return None

    def _open(self) -> None:
        # If a step fails, the next call does not repeat the steps before it. _close() can handle
        # missing objects.
        if not self._has_context:
            device_contexts.acquire(self.device)
            self._has_context = True
        if not self._has_guard:
            offset_guards.acquire(self.device)
            self._has_guard = True
        if not hasattr(self, "pd"):
            self.pd = ProtectionDomain(self.device)
            self.pool = BufferPool(self._loop, self.pd)
            self.parts = PartPool(self.pd)
        self._channel = CompletionChannel(self.device)

    def _add_queue(self, entries: int) -> SharedCompletionQueue:
        assert self._channel is not None
        limit = self.device.attributes.max_cqe
        if entries > limit:
            name = self.device.name
            raise ValueError(f"{name} allows a send_depth and recv_depth of {limit} together")
        queue = SharedCompletionQueue(self._channel, min(max(entries, CQ_ENTRIES), limit))
        self._queues[queue.cq.address] = queue
        queue.cq.request_notify()
        queue.is_armed = True
        queue.free -= entries
        return queue

    def _close(self) -> None:
        with self._lock:
            steps = [queue.close for queue in self._queues.values()]
            if self._channel is not None:
                steps.append(self._channel.close)
            if hasattr(self, "pd"):
                steps += [self.parts.close, self.pool.close, self.pd.close]
            if self._has_guard:
                steps.append(lambda: offset_guards.release(self.device))
            for step in steps:
                try:
                    step()
                except Exception:  # the other steps must be done, too
                    logger.exception("%s: a resource could not be destroyed", self.device.name)
            if self._has_context:
                device_contexts.release([self.device])

    # --- on the loop's thread ---

    @property
    def is_open(self) -> bool:
        """True if open() has made everything."""
        return self._channel is not None

    def try_reserve(self, entries: int) -> SharedCompletionQueue | None:
        """Do what reserve() does, without blocking. Return None if that makes system calls."""
        found = self._try_take_entries(entries)
        if found is None:
            for queue in list(self._queues.values()):
                if queue.free < entries <= queue.free + queue.released:
                    self._poll_released(queue)
            found = self._try_take_entries(entries)
        return found

    def _try_take_entries(self, entries: int) -> SharedCompletionQueue | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._take_entries(entries)
        finally:
            self._lock.release()

    def attach(self, handler: CompletionHandler) -> int:
        """Return a key for wr_ids. `handler` gets the completions with this key from now on.

        This object has a reference to the handler until detach(). So the memory of its requests is
        not freed while the device can write to it.
        """
        key = next(self._keys)
        self._handlers[key] = handler
        return key

    def attach_fast_path(
        self,
        key: int,
        sends: SendQueueCore,
        receives: ReceiveQueue | StreamDataPathCore,
        on_notified: Callable[[], None],
    ) -> None:
        """Have C code handle the completions with this key by `sends` and `receives`.

        The handler still gets the completions that C code leaves for Python. `on_notified` is
        called when there is pending work; it must not block. Lasts until detach(). Callable from
        any thread.
        """
        self._on_notified[key] = on_notified
        self._reader.attach(key, sends, receives)

    def start_reading(self) -> None:
        """Have the loop watch the completion channel. Call it after the first reserve().

        Do nothing after the last release(), or after a failure. A worker thread can have asked for
        it before: the end of a destruction in a thread of C can overtake its thread-safe call.
        """
        if self._failed or not self._users:
            return
        if not self.is_reading and self._channel is not None:
            self.is_reading = True
            self.dispatcher.watch(self._channel.address)
            self._loop.add_reader(self._channel.fd, self.dispatcher.handle_event)
            self._events.start()
            self._deferred_arming.start()

    def detach(self, key: int) -> None:
        """Remove the handler with this key. Call it when its queue pair is destroyed."""
        self._handlers.pop(key, None)
        self._reader.detach(key)
        self._on_notified.pop(key, None)
        self.queue_pairs.remove(key)

    def unreserve(self, queue: SharedCompletionQueue, entries: int) -> None:
        """Undo reserve(), when the queue pair is destroyed.

        The queue is polled first: completions of the queue pair can still occupy entries. If new
        queue pairs reserved these entries, the queue could overflow. Fewer than RELEASE_BATCH
        entries wait until they are needed, so that not each small queue pair costs a poll.
        """
        queue.released += entries
        if queue.released >= RELEASE_BATCH or self._loop.is_closed():
            self._poll_released(queue)

    def _poll_released(self, queue: SharedCompletionQueue) -> None:
        """Make the entries of destroyed queue pairs free, after all completions are polled."""
        entries, queue.released = queue.released, 0
        if self._loop.is_closed():  # no completion is polled any more, and no task waits for one
            self._add_free(queue, entries)
        else:
            self.drain(queue, partial(self._add_free, queue, entries))

    def _add_free(self, queue: SharedCompletionQueue, entries: int) -> None:
        with self._lock:
            queue.free += entries

    def release(self) -> None:
        """Remove one user. The last one closes all resources, in a worker thread."""
        self._users -= 1
        if self._users:
            return
        devices = _loop_devices[self._loop]
        if devices.get(self.device) is self:
            del devices[self.device]
        try:
            self._stop_reading()
            self._events.stop()
        finally:
            worker_pool.submit(self._close)

    def _stop_reading(self) -> None:
        if self.is_reading and self._channel is not None:
            self.is_reading = False
            self.dispatcher.watch(0)
            if not self._loop.is_closed():
                self._deferred_arming.stop()
            with suppress(RuntimeError):  # a closed loop watches no fd any more
                self._loop.remove_reader(self._channel.fd)

    def stop_polling(self, queue: SharedCompletionQueue) -> None:
        """Note that a task has stopped polling. After the last one, the loop arms the queue soon.

        The caller has increased `queue.pollers` before it polled.
        """
        queue.pollers -= 1
        if self._deferred_arming.is_on:
            self._deferred_arming.request()
        elif not (queue.pollers or queue.is_armed or queue.is_arming_scheduled):
            queue.is_arming_scheduled = True
            with suppress(RuntimeError):  # on a closed loop no task waits for an event
                self._loop.call_soon(lambda: self._arm_again(queue))

    def _arm_again(self, queue: SharedCompletionQueue) -> None:
        """Arm the queue, which is not armed while a task polls: see stop_polling().

        Otherwise each message would cost a system call to read the event, and one to arm the queue
        again.
        """
        queue.is_arming_scheduled = False
        self.dispatcher.arm_again(queue)

    def drain(self, queue: SharedCompletionQueue, then: Callable[[], None] = lambda: None) -> None:
        """Poll until the queue is empty, then call `then`.

        The queue is armed already, so later completions raise an event. `then` is called at once,
        or after iterations of the event loop if there are many completions. Must not be called from
        complete() of a handler.
        """
        for _ in range(MAX_BATCHES):
            if self._poll_batch(queue) < POLL_BATCH:
                then()
                return
        call_threadsafe(self._loop, lambda: run_with_inline_wakeups(self._drain_on, queue, then))

    def _poll_batch(self, queue: SharedCompletionQueue) -> int:
        """Take a batch of completions. Return their number; 0 if the device has failed."""
        if self._failed:
            return 0
        try:
            return self._reader.poll(queue.cq)
        except VerbsError as error:
            self._fail(error)
            return 0

    def poll_for(self, queue: SharedCompletionQueue, nanoseconds: int) -> None:
        """Poll until there is a completion, or for `nanoseconds`. Blocks the thread.

        If that wakes tasks, the loop's budget for polling ends: these tasks need the loop to run.
        Must not be called from complete() of a handler.
        """
        if self._failed:
            return
        scheduled = scheduled_count()
        try:
            self._reader.poll_for(queue.cq, nanoseconds)
        except VerbsError as error:
            self._fail(error)
        if scheduled_count() != scheduled:
            self.dispatcher.notified_at = time.monotonic_ns()

    def _dispatch_pending(self) -> None:
        """Dispatch the completions and the pending work of a batch. Called while polling."""
        self._reader.dispatch(self._handlers, self._on_notified, self.device.name)

    def _drain_on(self, queue: SharedCompletionQueue, then: Callable[[], None]) -> None:
        if self.is_reading:
            self.drain(queue, then)
        else:
            then()

    def _on_device_event(self, event: AsyncEvent) -> None:
        if event.type is not AsyncEventType.DEVICE_FATAL:
            self.queue_pairs.dispatch(event)
        elif not self._failed:
            self._fail(VerbsError(errno.ENODEV, "ibv_get_async_event"))

    def _on_failure(self, error: int, function: str) -> None:
        self._fail(VerbsError(error, function))

    def _fail(self, error: VerbsError) -> None:
        """Fail all handlers and stop reading: the fd of a failed device stays readable for ever."""
        logger.warning("%s: %s", self.device.name, error)
        self._failed = True
        self._stop_reading()
        for handler in list(self._handlers.values()):
            try:
                handler.device_failed(error)
            except Exception:  # the other handlers must be called too
                logger.exception("could not handle the failure of %s", self.device.name)


_loop_devices: WeakKeyDictionary[Loop, dict[Device, LoopDevice]] = WeakKeyDictionary()
