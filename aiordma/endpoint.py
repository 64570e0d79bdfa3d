"""Endpoint: a connected id with its queue pair and its queues; how a connection begins and ends.

The dispatch tables hold an endpoint as long as its queue pair lives, so that no memory under the
device depends on what users keep. A Connection is what users hold.

How it ends. The first cause is kept (`_end`): the peer's disconnect, a failed request, a device
that went away. Then the queue pair is moved to its error state, which flushes what is posted.
Receives complete in order, so when the last one is flushed every message that ever arrived has been
seen: only then do receivers hear of the end.

iWARP is different: its kernel flushes first and reports the disconnect then, and what is posted in
between is never heard of again. So there everything has been seen once the completion queue was
emptied after the report.
"""

from __future__ import annotations

import copy
import errno
import logging
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId, CmState
from aiordma.datapath import (
    NUMBER_MASK,
    RECEIVE,
    Berth,
    Operation,
    ReceiveRing,
    RemoteAccess,
    SendQueue,
    removal,
)
from aiordma.dispatch import failure_of
from aiordma.enums import AccessFlags, AsyncEventType, IdOption, WcOpcode, WcStatus
from aiordma.errors import (
    BusyError,
    LocalClosed,
    PeerClosed,
    RdmaError,
    VerbsError,
    WorkRequestError,
)
from aiordma.loop import Deadline, WaitQueue
from aiordma.memory import MemoryRegion
from aiordma.options import ConnectionOptions, PrivateDataLimits, check_private_data
from aiordma.rdmacm import ConnectionParameters
from aiordma.rdmacm.address import format_address
from aiordma.registering import register
from aiordma.verbs import AsyncEvent, QueuePairCaps

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)

# 0.64 ms. librdmacm leaves 0, which makes a sender that was early by a hair wait for 655 ms.
MIN_RNR_TIMER = 12
WRITTEN_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
# A device that has not flushed a queue pair by then has forgotten something.
FLUSH_SECONDS = 10.0
# How long a queue pair that failed has for saying why, in the completion of a request.
EXPLAINING_SECONDS = 0.5


class Endpoint:
    """One end of a connection. All methods are for the loop's thread, but for abandon()."""

    def __init__(self, cm: AsyncCmId, options: ConnectionOptions) -> None:
        """Take over `cm`, which is bound to a device; abort() destroys it too.

        Raises:
            ValueError: the options are more than the device can do.
        """
        self.device = cm.device()
        options.check_device(self.device)
        self.cm = cm
        self.options = options
        self.peer_private_data = b""
        self._ring = ReceiveRing(options.recv_depth, options.max_message_size)
        self._sends = SendQueue(cm.loop, options.send_depth)
        self._receivers = WaitQueue(cm.loop)
        self._changed = WaitQueue(cm.loop)
        self._end: RdmaError | None = None
        self._closing = False
        self._no_flush = False
        self._flushing: Deadline | None = None
        self._failing: Deadline | None = None
        caps = QueuePairCaps(
            max_send_wr=options.send_depth,
            max_recv_wr=options.recv_depth,
            max_inline_data=options.max_inline,
        )
        self._berth = Berth(cm, self, caps)
        self.initiator_depth = 0
        """Reads and atomics that may be under way from here; 0 until it is negotiated."""
        self.remote = RemoteAccess(cm.loop, self.device, self._sends, self)
        cm.on_change = self._on_cm_change
        cm.handle.on_released(self._release)

    # --- the beginning ---

    async def connect(self, private_data: bytes) -> None:
        """Make the queue pair, connect along the id's route, and wait until that is done.

        Raises: see AsyncCmId.connect. The endpoint is then only good for abort().
        """
        check_private_data(private_data, PrivateDataLimits.of(self.device).connect)
        limits, options = self.device.attributes, self.options
        resources = min(options.responder_resources, limits.max_qp_rd_atom)
        depth = min(options.initiator_depth, limits.max_qp_init_rd_atom)
        await self.cm.connect(self._parameters(private_data, resources, depth), self._prepare)
        self.initiator_depth = depth
        answer = self.cm.established
        if answer is not None:
            self.peer_private_data = answer.private_data
            if not self.device.is_iwarp:  # which does not tell
                self.initiator_depth = min(depth, answer.initiator_depth)
        self._shorten_rnr_delay()

    async def accept(self, private_data: bytes) -> None:
        """Make the queue pair, accept the id's request, and wait until the peer has confirmed.

        Raises: see AsyncCmId.accept. The endpoint is then only good for abort().
        """
        check_private_data(private_data, PrivateDataLimits.of(self.device).accept)
        request = self.cm.event
        assert request is not None
        self.peer_private_data = request.private_data
        limits, options = self.device.attributes, self.options
        # The event speaks from our side already: its responder_resources are the peer's
        # initiator_depth. iWARP insists on getting no fewer than it asked for.
        resources = min(request.responder_resources, limits.max_qp_rd_atom)
        if not self.device.is_iwarp:
            resources = min(resources, options.responder_resources)
        depth = min(request.initiator_depth, limits.max_qp_init_rd_atom, options.initiator_depth)
        await self.cm.accept(self._parameters(private_data, resources, depth), self._prepare)
        self.initiator_depth = depth
        self._shorten_rnr_delay()

    def _parameters(self, private_data: bytes, resources: int, depth: int) -> ConnectionParameters:
        return ConnectionParameters(
            private_data=private_data,
            responder_resources=resources,
            initiator_depth=depth,
            retry_count=self.options.retry_count,
            rnr_retry_count=self.options.rnr_retry_count,
        )

    def _prepare(self) -> None:
        """Get everything ready to receive, in a worker thread."""
        ack_timeout = self.options.ack_timeout
        if ack_timeout is not None:
            self.cm.cm_id.set_option(IdOption.ACK_TIMEOUT, ack_timeout)
        self.cm.cm_id.destroy_qp()  # one that rdma_create_ep() made
        qp = self._berth.make_qp(self._ring, self._sends)
        self._berth.watch(qp, self._on_queue_pair_event)

    def _shorten_rnr_delay(self) -> None:
        qp = self.cm.handle.qp
        if qp is not None and not self.device.is_iwarp:
            self.cm.handle.submit(lambda: qp.set_min_rnr_timer(MIN_RNR_TIMER))

    # --- messages ---

    @property
    def released(self) -> bool:
        """Whether it is on its way to be destroyed: nothing is left for the user to close."""
        return self.cm.state is CmState.CLOSED

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closing or self._end is not None

    def check_open(self) -> None:
        """Raise why nothing can be sent any more, if that is so."""
        if self._closing or self._end is not None:
            raise self.end_reason()

    async def register(self, buffer: Buffer, access: AccessFlags) -> MemoryRegion:
        """Pin memory for the device. See Connection.register."""
        self.check_open()
        return await register(self.cm.loop, self.device, buffer, access)

    async def send(self, data: bytes | memoryview, nbytes: int, imm: int) -> None:
        """Copy and post one message. See Connection.send."""
        self.check_open()
        if nbytes > self.options.max_message_size:
            limit = self.options.max_message_size
            raise ValueError(f"a message of {nbytes} bytes; max_message_size is {limit}")
        if not self._sends.try_reserve():
            await self._sends.reserve()
        try:
            self.check_open()
            if nbytes <= self.options.max_inline:
                self._sends.post_inline(data, imm)
            else:
                await self._send_copy(data, nbytes, imm)
        except VerbsError as error:
            self._sends.unreserve()
            raise self.not_posted(error) from None
        except BaseException:
            self._sends.unreserve()
            raise

    async def _send_copy(self, data: bytes | memoryview, nbytes: int, imm: int) -> None:
        buffer = self._sends.try_buffer(nbytes)
        if buffer is None:
            # Through the id's own queue of calls, so that its destruction waits for them.
            buffer = await self._sends.buffer(nbytes, self.cm.handle.call)
        try:
            self.check_open()
            self._sends.post_copy(buffer, data, imm)
        except VerbsError:
            # libsiw keeps a request that it reports as failed: the buffer is not given back yet.
            self._sends.keep(buffer)
            raise
        except BaseException:
            buffer.release()
            raise

    def not_posted(self, error: VerbsError) -> RdmaError:
        """A request was refused, or memory for it: the first ends the connection."""
        if error.function != "ibv_post_send":
            return error
        gone = self.device.is_iwarp and error.errno == errno.ENOTCONN
        self._break(PeerClosed(self._peer_closed()) if gone else error)
        return self.end_reason()

    def _peer_closed(self) -> str:
        return f"{format_address(self.cm.peer_address)} closed the connection"

    async def recv(self) -> bytes:
        """Take one message. See Connection.recv."""
        if len(self._receivers):
            raise BusyError("another task is receiving on this connection")
        while not len(self._ring) or self._closing:
            if self._closing or (self._end is not None and self._is_drained()):
                raise self.end_reason()
            await self._receivers.wait()
        slot, message = self._ring.take()
        if self._end is None:
            self._repost(slot)
        return message

    def _repost(self, slot: int) -> None:
        try:
            self._ring.post(slot)
        except VerbsError as error:
            self._break(error)

    def _is_drained(self) -> bool:
        return self._no_flush or not self._ring.posted

    def end_reason(self) -> RdmaError:
        """Why the connection is of no use: each time a new exception, with its own traceback."""
        if self._closing or self._end is None:
            return LocalClosed("the connection is closed on this side")
        return copy.copy(self._end)

    # --- completions ---

    def complete(self, number: int, wc: IbvWc) -> None:
        """Take a completion from the dispatcher."""
        if number & RECEIVE:
            self._received(number & NUMBER_MASK, wc)
        else:
            self._sent(number, wc)

    def _received(self, slot: int, wc: IbvWc) -> None:
        if wc.status == WcStatus.SUCCESS:
            # The bytes of a write with immediate data went elsewhere: the message itself is empty.
            written = wc.opcode == WRITTEN_WITH_IMM
            self._ring.arrived(slot, 0 if written else wc.byte_len)
            if self.cm.state is CmState.ACCEPTING:
                self.cm.notify_established()
        else:
            self._ring.flushed()
            self._request_failed(WcOpcode.RECV, wc)
        self._receivers.wake_all()

    def _sent(self, number: int, wc: IbvWc) -> None:
        lent = self._sends.completed(number)
        failed = wc.status != WcStatus.SUCCESS
        if lent.__class__ is Operation:
            lent.succeeded = not failed
        if failed:
            self._request_failed(WcOpcode.SEND, wc)
        if self._closing:
            self._changed.wake_all()

    def _request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        if self._end is not None or self._closing:
            return
        # On iWARP the kernel flushes before it reports the disconnect, which is about to come.
        if wc.status == WcStatus.WR_FLUSH_ERR and self.device.is_iwarp:
            return
        self._break(WorkRequestError(WcStatus(wc.status), opcode, wc.vendor_err))

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._expect_no_more()
        self._break(removal(error))

    def _on_queue_pair_event(self, event: AsyncEvent) -> None:
        failure = failure_of(event)
        if event.type is AsyncEventType.COMM_EST and self.cm.state is CmState.ACCEPTING:
            self.cm.notify_established()
        elif failure is not None and self._failing is None:
            # The completion of what failed, or the disconnect, say more, if they come.
            self._failing = Deadline(self.cm.loop, EXPLAINING_SECONDS, lambda: self._break(failure))

    # --- the end ---

    def _on_cm_change(self) -> None:
        state = self.cm.state
        if state is CmState.DISCONNECTED:
            self._break(PeerClosed(self._peer_closed()))
            if self.device.is_iwarp:
                self._berth.drain(self._expect_no_more)
        elif state in (CmState.FAILED, CmState.REMOVED):
            self._expect_no_more()
            failure = self.cm.failure(format_address(self.cm.peer_address))
            self._break(failure or RdmaError("the connection failed"))
        self._changed.wake_all()

    def _break(self, cause: RdmaError) -> None:
        """The connection is of no use any more, for this cause if there was none before."""
        if self._end is None:
            logger.debug("connection ended: %r", cause)
            self._end = cause
            self.cm.start_disconnect()
            self._sends.wake_senders()
            self._flushing = Deadline(self.cm.loop, FLUSH_SECONDS, self._expect_no_more)
        self._receivers.wake_all()
        self._changed.wake_all()

    def _expect_no_more(self) -> None:
        """Whatever has not completed by now never will."""
        self._no_flush = True
        self._sends.stop_waiting()
        self._receivers.wake_all()

    async def aclose(self) -> None:
        """Let what is posted reach the peer, disconnect, and destroy everything."""
        if not self._closing:
            self._start_closing()
            try:
                await self._wind_down()
            finally:
                self.abort()
        await self.cm.handle.wait_destroyed()

    def _start_closing(self) -> None:
        self._closing = True
        self._receivers.wake_all()
        self._sends.wake_senders()

    async def _wind_down(self) -> None:
        deadline = Deadline(self.cm.loop, self.options.close_timeout, self._changed.wake_all)
        try:
            while self._is_up() and len(self._sends) and not deadline.expired:
                await self._changed.wait()
            self.cm.start_disconnect()
            while self.cm.state is CmState.DISCONNECTING and not deadline.expired:
                await self._changed.wait()
        finally:
            deadline.cancel()

    def _is_up(self) -> bool:
        return self._end is None and self.cm.state is CmState.CONNECTED

    def abort(self) -> None:
        """End it at once; everything is destroyed in the background. Idempotent."""
        self._start_closing()
        self.cm.abort()

    def abandon(self) -> None:
        """abort() from any thread, when nobody can be waiting any more."""
        self._closing = True
        self.cm.abandon()

    def _release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.cm.on_change = None
        for deadline in (self._flushing, self._failing):
            if deadline is not None:
                deadline.cancel()
        self._sends.abandon()
        self._berth.release()
