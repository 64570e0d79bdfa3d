"""IdHandle: the C objects of an id, the calls on it in threads, and its ordered destruction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import TypeVar

from aiordma.cm.id_call_queue import IdCallQueue
from aiordma.cm.id_waits import IdWaits
from aiordma.cm.occasional_log import OccasionalLog
from aiordma.dispatch import CmDispatcher, destroy_and_log
from aiordma.errors import BusyError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import (
    Deadline,
    Interrupt,
    Loop,
    WaitQueue,
    WorkerPool,
    blocking_pool,
    checkpoint,
    ensure_called,
    is_forked_child,
    make_in_worker,
    run_in_worker,
    running_loop,
    worker_pool,
)
from aiordma.rdmacm import CmId, IdAddresses, IdCalls, OwnChannel, OwnObjects, device_contexts
from aiordma.verbs import Device, QueuePair

logger = logging.getLogger(__name__)
slow_destruction_log = OccasionalLog(logger)

SLOW_DESTRUCTION_SECONDS = 30.0
"""Seconds after which a task that waits for a destruction logs that it still waits."""

T = TypeVar("T")


class IdHandle:
    """An id, its own channel, its queue pair, and the memory of the queue pair's requests.

    Calls on the id that can block run in worker threads, one after the other. The destruction runs
    after them. So it also waits for a call whose task was cancelled.
    """

    def __init__(self, loop: Loop, cm_id: CmId, channel: OwnChannel | None = None) -> None:
        self.loop = loop
        self.cm_id = cm_id
        self.channel = channel
        """The id's own channel, with a reference to it. None: the channel that ids share."""
        self.request_addresses: IdAddresses | None = None
        """The addresses of a connection request, which do not change. None: of another id."""
        self.is_slow_to_destroy = False
        """True if destroying can take seconds, as on iWARP."""
        self.calls = IdCallQueue()
        """The calls on the id in other threads."""
        self._waits: IdWaits | None = None
        """The calls of wait() under way. None: there was none yet, as for most ids."""
        self._device: Device | None = None
        self._pre_destroy_hooks: dict[Hashable, Callable[[], None]] = {}
        self._destroyed_callbacks: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._released_callbacks: list[Callable[[], None]] = []
        self._is_destroying = self._is_destroyed = False
        self._waiters: dict[Loop, WaitQueue] = {}
        """The tasks of wait_destroyed(). Any loop can close a SyncCmId."""

    @property
    def qp(self) -> QueuePair | None:
        """The queue pair of the id, if it has one."""
        return self.cm_id.qp

    def move_to(self, loop: Loop) -> None:
        """Belong to another loop from now on, unless destruction has begun."""
        if not self._is_destroying:
            self.loop = loop

    def add_pre_destroy_hook(self, key: Hashable, hook: Callable[[], None]) -> None:
        """Make a worker thread call `hook` before anything is destroyed."""
        self._pre_destroy_hooks[key] = hook

    def remove_pre_destroy_hook(self, key: Hashable) -> Callable[[], None] | None:
        """Remove the hook of `key` and return it; None if there is none."""
        return self._pre_destroy_hooks.pop(key, None)

    def add_destroyed_callback(
        self, callback: Callable[[], None], blocks: Callable[[], bool] = lambda: True
    ) -> None:
        """Call `callback` when the device can access no memory any more.

        A worker thread calls it, or the loop if `blocks()` is false when destruction begins.
        """
        self._destroyed_callbacks.append((callback, blocks))

    def add_released_callback(self, callback: Callable[[], None]) -> None:
        """Make the loop call `callback` when everything is destroyed: the last one added first."""
        self._released_callbacks.append(callback)

    def remove_released_callback(self, callback: Callable[[], None]) -> None:
        """Remove a callback of add_released_callback()."""
        self._released_callbacks.remove(callback)

    def acquire_context(self) -> None:
        """Keep the device's context open until everything is destroyed.

        Call this before anything is made in librdmacm's default protection domain, which is freed
        with the context.

        Raises:
            DeviceRemoved: the device was removed.
        """
        if self._device is None:
            device = self.cm_id.device()
            device_contexts.acquire(device)
            self._device = device

    # --- channels ---

    def move_to_own_channel(self) -> OwnChannel:
        """Move the id to a new channel of its own, and return the channel: rdma_migrate_id(3).

        Does not block. No other thread may read the old channel meanwhile.

        Raises:
            VerbsError: EMFILE; ENXIO (the device was removed).
            BusyError: a call on the id is under way.
        """
        self._lock_channel()
        try:
            channel = OwnChannel()
            try:
                self.cm_id.migrate(channel)
            except BaseException:
                channel.release()
                raise
            self._change_channel(channel)
            return channel
        finally:
            self.calls.channel_lock.release()

    def move_to_loop(self, dispatcher: CmDispatcher) -> None:
        """Move the id to the channel that the ids of a loop share: rdma_migrate_id(3).

        Otherwise as move_to_own_channel(), but without a new descriptor.
        """
        self._lock_channel()
        try:
            dispatcher.migrate_id(self.cm_id)
            self._change_channel(None)
        finally:
            self.calls.channel_lock.release()

    def _change_channel(self, channel: OwnChannel | None) -> None:
        old, self.channel = self.channel, channel
        if old is not None:
            old.release()

    def _lock_channel(self) -> None:
        if not self.calls.channel_lock.acquire(blocking=False):
            raise BusyError("a call on this id is under way")

    # --- calls ---

    def call(
        self, function: Callable[[], T], pool: WorkerPool = worker_pool
    ) -> Coroutine[object, None, T]:
        """Await a call on the id in a thread of `pool`.

        Cancelling returns at once. A call under way continues, and destruction waits for it.

        Raises:
            LocalClosed: destruction has begun.
        """
        return run_in_worker(self.loop, function, lambda job: self._submit(job, pool))

    def _submit(self, job: Callable[[], None], pool: WorkerPool = worker_pool) -> None:
        if not self.calls.submit(job, pool):
            raise LocalClosed("closed on this side")

    def make_calls(self, calls: IdCalls, on_end: Callable[[], None]) -> None:
        """Have a thread of C make calls on the id, then have the loop call `on_end`.

        Raises:
            LocalClosed: destruction has begun.
        """
        if not self.calls.submit_calls(calls, on_end):
            raise LocalClosed("closed on this side")

    def submit_calls(self, calls: IdCalls) -> None:
        """Have a thread of C make calls on the id, without waiting for them. Errors are ignored.

        They are not made if destruction has begun. The id has a reader of such calls.
        """
        self.calls.submit_calls(calls, lambda: None, lambda: self._is_destroying)

    async def make(
        self,
        make: Callable[[], T],
        discard: Callable[[T], None],
        on_unmade: Callable[[], None],
    ) -> T:
        """Await a call on the id that makes an object: see make_in_worker().

        Raises:
            LocalClosed: destruction has begun.
        """
        return await make_in_worker(self.loop, make, discard, self._submit, on_unmade)

    async def wait(self, function: Callable[[Interrupt], T], *, serialized: bool = True) -> T:
        """Await `function(interrupt)`, which waits in a worker thread without a time limit.

        Cancelling, and destroying the id, set the interrupt. The function must then return. If
        `serialized`, it is a call on the id, and only one such call runs at a time.

        Raises:
            LocalClosed: destruction has begun.
        """
        interrupt = Interrupt()
        if self._waits is None:
            self._waits = IdWaits()
        if self._is_destroying:  # checked last: another thread can begin destruction
            raise LocalClosed("closed on this side")
        run = partial(self._waits.run, function, interrupt)
        try:
            if serialized:
                return await self.call(run, blocking_pool)
            return await run_in_worker(self.loop, run, blocking_pool.submit)
        except BaseException:
            interrupt.set()
            raise

    @property
    def interrupts(self) -> list[Interrupt]:
        """The interrupts of the calls of wait() under way."""
        return [] if self._waits is None else self._waits.interrupts

    def interrupt_waits(self) -> None:
        """Make every wait() return. Its caller can call it again. Callable from any thread."""
        if self._waits is not None:
            self._waits.interrupt()

    def submit(self, function: Callable[[], None]) -> None:
        """Make a call on the id in a worker thread, without waiting for it. Errors are only logged.

        The call is not made if destruction has begun.
        """
        self.calls.submit(partial(self._run, function))

    def run(self, function: Callable[[], None]) -> None:
        """As submit(), for a call that does not block: make it now, if none is under way."""
        self.calls.run(partial(self._run, function))

    def _run(self, function: Callable[[], None]) -> None:
        if self._is_destroying:
            return
        try:
            function()
        except RdmaError as error:
            logger.debug("ignored: %s", error)

    # --- the end ---

    def destroy(self) -> None:
        """Begin to destroy everything, in another thread. Idempotent. Callable from any thread."""
        if self._is_destroying:
            return
        self._is_destroying = True
        if is_forked_child():
            self._is_destroyed = True  # the C objects belong to the parent
            return
        if self._waits is not None:
            self._waits.end()
        # Nothing is added if another thread has begun at the same time.
        self.calls.add(self._start_destruction, is_last=True)

    def _start_destruction(self) -> None:
        """Destroy everything in a thread of C, or in a worker thread if it needs Python."""
        reader = self.calls.reader
        if reader is None or self._needs_worker():
            pool = blocking_pool if self.is_slow_to_destroy else worker_pool
            pool.submit(self._destroy)
            return
        calls = IdCalls(self.cm_id)
        calls.destroy()
        reader.submit(calls, partial(self._destroyed, calls))

    def _needs_worker(self) -> bool:
        """Return True if more must be destroyed than the id and its queue pair, or if it waits."""
        return bool(
            self.is_slow_to_destroy
            or self.channel is not None
            or self._waits is not None
            or self._pre_destroy_hooks
            or self.cm_id.has_own_queues
            or any(blocks() for _, blocks in self._destroyed_callbacks)
        )

    def _destroyed(self, calls: IdCalls) -> None:
        """Free the memory. Called when the calls that destroy the id have ended."""
        try:
            calls.check()
        except VerbsError as error:
            if error.function == "ibv_destroy_qp":
                self._keep_memory(calls)
                self._finish()
                return
            logger.exception("an id could not be destroyed")
        self._free_memory()
        self._finish()

    async def wait_destroyed(self) -> None:
        """Wait until everything is destroyed, on any loop. Cancelling stops the wait only.

        A warning is logged if that takes longer than SLOW_DESTRUCTION_SECONDS.
        """
        if is_forked_child():  # no loop runs there
            return
        loop = running_loop() if self.calls.reader is None else self.loop
        await checkpoint(loop)
        waiters = self._waiters.setdefault(loop, WaitQueue(loop))  # first: see _finish()
        timer = Deadline(loop, SLOW_DESTRUCTION_SECONDS, _log_slow_destruction)
        try:
            while not self._is_destroyed:
                await waiters.wait()
        finally:
            timer.cancel()

    def _destroy(self) -> None:
        if self._waits is not None:
            self._waits.join()
        try:
            self._destroy_objects()
        finally:  # tasks wait for it
            ensure_called(self.loop, self._finish)

    def _destroy_objects(self) -> None:
        while self._pre_destroy_hooks:
            _, hook = self._pre_destroy_hooks.popitem()
            try:
                hook()
            except RdmaError as error:
                logger.debug("ignored: %s", error)
        own = self.cm_id.own_objects()
        # The id first: afterwards rdma_get_cm_event(), on the loop's thread, can no longer be
        # using its queue pair.
        destroy_and_log(self.cm_id)
        if self.channel is not None:
            self.channel.release()
        try:
            own.destroy()
        except Exception:  # the memory must not be freed
            self._keep_memory(own)
        else:
            self._free_memory()

    def _keep_memory(self, own: IdCalls | OwnObjects) -> None:
        """Never free `own` and the memory of the requests, as the device might still use it."""
        logger.exception("a queue pair or its queues could not be destroyed")
        _undestroyed.append((own, self._destroyed_callbacks, self._released_callbacks))
        self._released_callbacks = []

    def _free_memory(self) -> None:
        for callback, _ in reversed(self._destroyed_callbacks):
            try:
                callback()
            except Exception:  # the other memory must be freed
                logger.exception("%r failed", callback)
        if self._device is not None:
            self._device.release()

    def _finish(self) -> None:
        for callback in reversed(self._released_callbacks):
            try:
                callback()
            except Exception:  # the other resources must be released
                logger.exception("%r failed", callback)
        self._released_callbacks, self._destroyed_callbacks = [], []
        self._is_destroyed = True
        for loop, waiters in list(self._waiters.items()):
            if loop is self.loop:
                waiters.wake_all()
            else:
                ensure_called(loop, waiters.wake_all)


def _log_slow_destruction() -> None:
    slow_destruction_log.log(
        logging.WARNING,
        "an id is not destroyed after %.0f s: the kernel waits for its peer, which can take "
        "2 minutes, or its connection manager has failed. If the output of dmesg has "
        "'kernel BUG', only a reboot ends the wait",
        SLOW_DESTRUCTION_SECONDS,
    )


_undestroyed: list[object] = []
