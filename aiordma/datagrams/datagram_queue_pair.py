"""DatagramQueuePair: a bound id with a datagram queue pair; sending, receiving and closing.

The dispatch tables hold a reference to a DatagramQueuePair as long as its C queue pair exists.
Users hold a DatagramEndpoint.

The id with the queue pair also listens. Other ids have no queue pair: one for each peer that is
being resolved, one for each group (a listening id cannot join a group), and one that arrives with
each request. They are closed with the first.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId, CmState
from aiordma.cm.failures import translate_removal
from aiordma.datagrams.address_handles import AddressHandleCache
from aiordma.datagrams.datagram_receive_ring import Datagram, DatagramReceiveRing
from aiordma.datagrams.datagram_send_queue import DatagramSend, DatagramSendQueue
from aiordma.datagrams.options import DatagramOptions
from aiordma.datagrams.peer import AddressKey
from aiordma.dispatch import failure_of
from aiordma.enums import IdOption, PortSpace, WcOpcode, WcStatus
from aiordma.errors import (
    BusyError,
    LocalClosed,
    RdmaError,
    VerbsError,
    WorkRequestError,
)
from aiordma.loop import Deadline, WaitQueue, checkpoint_of, refuse_forked_child
from aiordma.qp import NUMBER_MASK, RECEIVE, QueuePairResources
from aiordma.rdmacm import SocketAddress
from aiordma.rdmacm.address import format_address
from aiordma.verbs import (
    AddressHandle,
    AddressHandleAttributes,
    AsyncEvent,
    QueuePair,
    QueuePairCaps,
)

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)


class DatagramQueuePair:
    """The core of a datagram endpoint. All methods but abandon() run on the loop's thread."""

    def __init__(self, cm: AsyncCmId, options: DatagramOptions) -> None:
        """Take ownership of `cm`, which is bound to a device. abort() destroys it too.

        Raises:
            ValueError: an option exceeds a limit of the device.
        """
        options.check_device(cm.device())
        address = cm.cm_id.local_address
        assert address is not None
        self.cm = cm
        self.options = options
        self.source: SocketAddress = replace(address, port=0)
        self.max_message_size = 0
        self._port_num = cm.port_num
        self._gid = cm.cm_id.route.sgid
        self._qp: QueuePair
        self.receive_ring: DatagramReceiveRing
        self._sends = DatagramSendQueue(cm.loop, options.send_depth, selective=False)
        self._handles = AddressHandleCache(cm.handle, self._create_handle)
        self._receive_waiters = WaitQueue(cm.loop)
        self._request_waiters = WaitQueue(cm.loop)
        self._checkpoint = checkpoint_of(type(cm.loop))
        self._changed = WaitQueue(cm.loop)
        self._other_ids: set[AsyncCmId] = set()
        self._cause: RdmaError | None = None
        self._closing = False
        caps = QueuePairCaps(
            max_send_wr=options.send_depth,
            max_recv_wr=options.recv_depth,
            max_inline_data=options.max_inline,
        )
        self._resources = QueuePairResources(cm, self, caps)
        cm.on_change = self._on_cm_change
        cm.handle.add_released_callback(self._release)

    async def open(self) -> None:
        """Create the queue pair and post the receives.

        Raises:
            VerbsError: EOPNOTSUPP (the device has no datagrams), ENOMEM.
            ValueError: an option exceeds a limit of the port.
        """
        await self.cm.handle.call(self._prepare)

    def _prepare(self) -> None:
        """Create the queue pair and post the receives, in a worker thread."""
        options = self.options
        mtu = self.cm.device().query_port(self._port_num).active_mtu
        size = options.max_message_size
        if size is not None and size > mtu:
            raise ValueError(f"max_message_size is {size}; the port's MTU carries {mtu} bytes")
        self.max_message_size = size or mtu
        self.receive_ring = DatagramReceiveRing(options.recv_depth, mtu)
        self.cm.handle.add_destroyed_callback(self.receive_ring.close)
        self._qp = self._resources.make_qp(self.receive_ring, self._sends)
        self._resources.watch(self._qp, self._on_queue_pair_event)

    @property
    def qp(self) -> QueuePair:
        """The queue pair."""
        return self._qp

    async def create_id(self) -> AsyncCmId:
        """Create another id, without a queue pair. The caller closes it, or else aclose() does.

        Raises:
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
        """
        cm = await AsyncCmId.create(PortSpace.UDP)
        self._other_ids.add(cm)
        cm.handle.add_released_callback(lambda: self._other_ids.discard(cm))
        try:
            self.check_open()
            if self.options.tos is not None:
                cm.set_option(IdOption.TOS, self.options.tos)
        except BaseException:
            cm.abort()
            raise
        return cm

    # --- sending ---

    async def send_to(
        self, key: AddressKey, destination: tuple[int, int], data: bytes, imm: int
    ) -> None:
        """Copy and post one datagram. See DatagramEndpoint.send_to."""
        self.check_open()
        if len(data) > self.max_message_size:
            limit = self.max_message_size
            raise ValueError(f"a datagram of {len(data)} bytes; the limit is {limit} bytes (MTU)")
        if self._checkpoint is not None:
            await self._checkpoint()
        datagram_send = DatagramSend(await self._handles.acquire(key))
        try:
            if not self._sends.try_reserve():
                await self._sends.reserve()
            try:
                await self._post(datagram_send, destination, data, imm)
            except BaseException:
                if not self._sends.is_in_flight(datagram_send):
                    self._sends.unreserve()
                raise
        except BaseException:
            # After a Ctrl-C the request can be in flight: its completion releases both.
            if not self._sends.is_in_flight(datagram_send):
                datagram_send.release()
            raise

    async def _post(
        self, datagram_send: DatagramSend, destination: tuple[int, int], data: bytes, imm: int
    ) -> None:
        """Copy and post one datagram, with the send credit that the caller has reserved."""
        if len(data) > self.options.max_inline:
            datagram_send.buffer = self._sends.try_buffer(len(data))
            if datagram_send.buffer is None:
                datagram_send.buffer = await self._sends.buffer(len(data), self.cm.handle.call)
        self.check_open()
        try:
            self._sends.post_to(datagram_send, data, imm, destination)
        except VerbsError as error:
            self._fail(error)
            raise

    def _create_handle(self, key: AddressKey) -> AddressHandle:
        """Create an address handle, in a worker thread."""
        if not isinstance(key, AddressHandleAttributes):
            key = key.attributes(self.cm.device(), self._port_num, self._gid)
        return AddressHandle(self._resources.domain.pd, key)

    # --- receiving ---

    async def recv_from(self) -> Datagram:
        """Take one datagram. See DatagramEndpoint.recv_from."""
        self._check_idle(self._receive_waiters, "receiving")
        if self._checkpoint is not None:
            await self._checkpoint()
            self._check_idle(self._receive_waiters, "receiving")
        while self._closing or not len(self.receive_ring):
            self.check_open()
            await self._receive_waiters.wait()
        slot, datagram = self.receive_ring.take_datagram()
        if self._cause is None:
            self._repost(slot)
        return datagram

    def _check_idle(self, waiters: WaitQueue, activity: str) -> None:
        """Raise BusyError if another task waits in `waiters`."""
        if len(waiters):
            raise BusyError(f"another task is {activity} on this endpoint")

    def _repost(self, slot: int) -> None:
        try:
            self.receive_ring.post(slot)
        except VerbsError as error:
            self._fail(error)

    # --- completions ---

    def complete(self, number: int, wc: IbvWc) -> None:
        """Handle a completion. Called by the dispatcher."""
        if number & RECEIVE:
            self._received(number & NUMBER_MASK, wc)
        else:
            self._sent(number, wc)

    def _received(self, slot: int, wc: IbvWc) -> None:
        self.receive_ring.completed()
        if wc.status != WcStatus.SUCCESS:
            self._request_failed(WcOpcode.RECV, wc)
        elif self._is_unwanted_copy(slot, wc):
            self._repost(slot)
        else:
            self.receive_ring.append(slot, wc)
            self._receive_waiters.wake_all()

    def _is_unwanted_copy(self, slot: int, wc: IbvWc) -> bool:
        """Return True for this endpoint's own multicast datagrams, if they are to be dropped."""
        if self.options.multicast_loopback or wc.src_qp != self._qp.number:
            return False
        return self.receive_ring.is_own_multicast(slot, wc, self._gid)

    def _sent(self, number: int, wc: IbvWc) -> None:
        self._sends.completed(number)
        if wc.status != WcStatus.SUCCESS:
            self._request_failed(WcOpcode.SEND, wc)
        if self._closing:
            self._changed.wake_all()

    def _request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        self._fail(WorkRequestError(WcStatus(wc.status), opcode, wc.vendor_err))

    def device_failed(self, error: VerbsError) -> None:
        """End the endpoint: the device was removed or failed, and completes nothing any more."""
        self._fail(translate_removal(error))

    def _on_queue_pair_event(self, event: AsyncEvent) -> None:
        failure = failure_of(event)
        if failure is not None:
            self._fail(failure)

    # --- requests of peers ---

    def listen(self, backlog: int) -> None:
        """Let peers resolve this endpoint. See DatagramEndpoint.listen."""
        self.check_open()
        self.cm.listen(backlog or self.options.backlog)

    @property
    def is_listening(self) -> bool:
        """True if peers can resolve this endpoint."""
        return self.cm.state is CmState.LISTENING

    async def get_request(self) -> AsyncCmId:
        """Wait for a request of a peer. See DatagramEndpoint.get_request."""
        self._check_idle(self._request_waiters, "waiting for requests")
        if self._checkpoint is not None:
            await self._checkpoint()
            self._check_idle(self._request_waiters, "waiting for requests")
        while True:
            self.check_open()
            if not self.is_listening:
                raise RdmaError("the endpoint does not listen: call listen() first")
            request = self.cm.take_request()
            if request is not None:
                return request
            await self._request_waiters.wait()

    # --- closing ---

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""
        return self._closing or self._cause is not None

    @property
    def released(self) -> bool:
        """True once the queue pair is being destroyed: the user has nothing left to close."""
        return self.cm.state is CmState.CLOSED

    def check_open(self) -> None:
        """Raise the cause if the endpoint is closed, each time as a new exception object.

        Raises:
            LocalClosed, DeviceRemoved, WorkRequestError: the endpoint has ended.
            RdmaError: this process is a forked child.
        """
        refuse_forked_child()
        if self._closing:
            raise LocalClosed("the endpoint is closed on this side")
        if self._cause is not None:
            raise copy.copy(self._cause)

    def _on_cm_change(self) -> None:
        if self.cm.state in (CmState.FAILED, CmState.REMOVED):
            failure = self.cm.failure(format_address(self.cm.local_address))
            self._fail(failure or RdmaError("the endpoint failed"))
        self._request_waiters.wake_all()

    def _fail(self, cause: RdmaError) -> None:
        """End the endpoint with `cause`, unless it has ended already."""
        if self.closed:
            return
        logger.debug("datagram endpoint ended: %r", cause)
        self._cause = cause
        self._wake_all()

    def _wake_all(self) -> None:
        self._sends.wake_senders()
        self._receive_waiters.wake_all()
        self._request_waiters.wake_all()
        self._changed.wake_all()

    async def aclose(self) -> None:
        """Wait for posted sends and destroy everything. See DatagramEndpoint.aclose."""
        if not self._closing:
            self._closing = True
            self._wake_all()
            try:
                await self._close_gracefully()
            finally:
                self.abort()
        for cm in [*self._other_ids]:
            await cm.aclose()
        await self.cm.handle.wait_destroyed()

    async def _close_gracefully(self) -> None:
        deadline = Deadline(self.cm.loop, self.options.close_timeout, self._changed.wake_all)
        try:
            while self._cause is None and len(self._sends) and not deadline.expired:
                await self._changed.wait()
        finally:
            deadline.cancel()

    def abort(self) -> None:
        """End the endpoint at once; everything is destroyed in the background. Idempotent."""
        self._closing = True
        self._wake_all()
        for cm in [*self._other_ids]:
            cm.abort()
        self.cm.abort()

    def abandon(self) -> None:
        """Abort from any thread, when no task can wait any more."""
        self._closing = True
        for cm in [*self._other_ids]:
            cm.abandon()
        self.cm.abandon()

    def _release(self) -> None:
        """Release the shared resources. Called when the queue pair is destroyed."""
        self.cm.on_change = None
        self._sends.abandon()
