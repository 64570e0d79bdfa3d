"""CmQueues: the queue pair of an id and the memory for it, as rdma_verbs.h has them, awaited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiordma.cm.handle import IdHandle
from aiordma.cm.lifecycle import CmLifecycle
from aiordma.cm.states import CmState
from aiordma.enums import QpState, SrqType
from aiordma.errors import BusyError
from aiordma.loop import Interrupt, checkpoint
from aiordma.rdmacm import CmEvent, OwnQueue
from aiordma.verbs import (
    Completion,
    ProtectionDomain,
    QueuePair,
    QueuePairAttributes,
    QueuePairInit,
    Registration,
    SharedReceiveQueue,
    SharedReceiveQueueCaps,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CmQueues(CmLifecycle):
    """For those who drive a queue pair themselves; a Connection has ways of its own."""

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        super().__init__(handle, state, event)
        self._sent = _Completions()
        self._received = _Completions()

    # --- the queue pair ---

    async def create_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """Make the id's queue pair, which is destroyed with it: rdma_create_qp(3), in a worker.

        In `pd`, or librdmacm's default one; where `init` names no completion queue, the id gets one
        of its own, which get_send_comp() and get_recv_comp() read. Cancelling leaves the queue pair
        to the id.

        Raises:
            VerbsError: EINVAL (more than the device can, or there is one), ENOMEM, EOPNOTSUPP.
            DeviceRemoved: the device went away.
            ValueError: an argument is closed, or the id is not bound to a device yet.
        """
        self._check_open()
        return await self.handle.call(lambda: self.make_qp(init, pd))

    def make_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """What create_qp() does. Blocks, so call it in a worker thread: inside `prepare`."""
        if pd is None:
            self.handle.keep_device()
        with self.handle.channel_lock:
            return self.cm_id.create_qp(init, pd)

    def init_qp_attr(self, state: QpState) -> QueuePairAttributes:
        """What a queue pair made by hand needs to go to `state`: rdma_init_qp_attr(3).

        Raises:
            VerbsError: EINVAL (the id is not so far).
        """
        self._check_open()
        return self.cm_id.init_qp_attr(state)

    async def create_srq(
        self,
        caps: SharedReceiveQueueCaps,
        pd: ProtectionDomain | None = None,
        srq_type: SrqType = SrqType.BASIC,
    ) -> SharedReceiveQueue:
        """Make a shared receive queue, which is destroyed with the id: rdma_create_srq(3).

        Made before the queue pair, it serves that; `post_recv` of the id then goes there. An XRC
        queue (rdma_create_srq_ex(3)) brings its domain along. Other queue pairs share it if it
        is given in their QueuePairInit, and must be destroyed first.

        Raises:
            VerbsError: EOPNOTSUPP (not this type, on this device), EINVAL, ENOMEM.
            ValueError: an argument is closed, or the id is not bound to a device yet.
        """
        self._check_open()

        def create() -> SharedReceiveQueue:
            if pd is None:
                self.handle.keep_device()
            if srq_type is SrqType.BASIC:
                return self.cm_id.create_srq(pd, caps)
            return self.cm_id.create_srq_ex(pd, caps, srq_type)

        return await self.handle.call(create)

    # --- memory ---

    async def reg_msgs(self, buffer: Buffer) -> Registration:
        """Register memory to send from and receive into: rdma_reg_msgs(3), in a worker thread.

        `cm_id.post_send` and its like take it. It is unregistered with the id at the latest; its
        close() does so earlier (rdma_dereg_mr(3)). Cancelling leaves it to the id.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached).
            ValueError: the id is not bound to a device yet.
            BufferError: the buffer is not contiguous.
        """
        return await self._register(lambda: self.cm_id.reg_msgs(buffer))

    async def reg_read(self, buffer: Buffer) -> Registration:
        """Register memory that the peer may read: rdma_reg_read(3). Raises: as reg_msgs."""
        return await self._register(lambda: self.cm_id.reg_read(buffer))

    async def reg_write(self, buffer: Buffer) -> Registration:
        """Register memory that the peer may write: rdma_reg_write(3). Raises: as reg_msgs."""
        return await self._register(lambda: self.cm_id.reg_write(buffer))

    async def _register(self, register: Callable[[], Registration]) -> Registration:
        self._check_open()

        def call() -> Registration:
            self.handle.keep_device()
            registration = register()
            self.handle.on_destroyed(registration.close)
            return registration

        return await self.handle.call(call)

    # --- completions ---

    async def get_send_comp(self) -> Completion:
        """Wait for the next completion of the id's own send queue: rdma_get_send_comp(3).

        In a worker thread. Cancelling loses none. A failed request is no exception here, see
        `Completion.check`. When the peer disconnects while somebody waits, this side does too, as
        it has to anyway: what is posted is then flushed, and so ends the wait.

        Raises:
            LocalClosed: the id is closed, or was while waiting.
            DeviceRemoved: the device went away.
            ValueError: the id has no completion queue of its own for sending.
            BusyError: another task waits here.
            VerbsError: the queue is broken.
        """
        self._check_open()
        return await self._next(self._sent, self.cm_id.send_queue())

    async def get_recv_comp(self) -> Completion:
        """Wait for the next completion of its own receive queue: rdma_get_recv_comp(3).

        As get_send_comp() otherwise.
        """
        self._check_open()
        return await self._next(self._received, self.cm_id.recv_queue())

    async def _next(self, completions: _Completions, queue: OwnQueue) -> Completion:
        with completions.waiting():
            await checkpoint()
            self._flush_if_ended()
            while not completions.done:
                self._check_waitable()
                await self.handle.wait(
                    lambda interrupt: self._read_one(completions, queue, interrupt), in_turn=False
                )
            return completions.done.popleft()

    def _check_waitable(self) -> None:
        if self.state in (CmState.FAILED, CmState.REMOVED, CmState.CLOSED):
            raise self._error("the peer", CmState.CONNECTED)

    def _read_one(self, completions: _Completions, queue: OwnQueue, interrupt: Interrupt) -> None:
        """In a thread: wait for one. Armed before it is polled again, so that none is missed."""
        while (completion := queue.poll()) is None:
            queue.arm()
            if (completion := queue.poll()) is not None:
                break
            if not interrupt.wait_readable(queue.fd, *self._event_fds()):
                return
            queue.read_event()
            self._look_for_events()
        completions.done.append(completion)

    def _event_fds(self) -> list[int]:
        """Where an event that ends the wait would come in, if nobody else watches."""
        return []

    def _look_for_events(self) -> None:
        """In a thread: take note of such an event."""

    def handle_event(self, event: CmEvent) -> None:
        """Take note of an event."""
        super().handle_event(event)
        if not (self._sent.busy or self._received.busy):
            return
        self._flush_if_ended()
        if self.state in (CmState.FAILED, CmState.REMOVED):
            self.handle.interrupt_waits()

    def _flush_if_ended(self) -> None:
        if self.state is CmState.DISCONNECTED:
            self.handle.submit(self._flush)

    def _flush(self) -> None:
        with self.handle.channel_lock:
            self.cm_id.disconnect()


class _Completions:
    """The completions of one queue that a thread has read, and whether a task waits for more."""

    def __init__(self) -> None:
        self.done: deque[Completion] = deque()
        self.busy = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self.busy:
            raise BusyError("another task is waiting for completions here")
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
