"""Endpoint: a connected id with its queue pair and its queues; how a connection begins and ends.

The dispatch tables hold an endpoint as long as its queue pair lives, so that no memory under the
device depends on what users keep. A Connection is what users hold.

How it ends. The first cause is kept (`_end`): the peer's disconnect, a failed request, a device
that went away. Then the queue pair is moved to its error state, which flushes what is posted.
Receives complete in order, so when the last one is flushed every message that ever arrived has been
seen: only then do receivers hear of the end.

iWARP is different: its kernel flushes first and reports the disconnect then, and what is posted in
between is never heard of again. So there everything has been seen once the completion queue was
emptied after the report; and likewise with a shared receive queue, which nobody flushes.
"""

from __future__ import annotations

import copy
import errno
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from aiordma.cm import AsyncCmId, CmState
from aiordma.dispatch import LoopDevice, failure_of
from aiordma.enums import AsyncEventType, IdOption, WcOpcode, WcStatus
from aiordma.errors import (
    LocalClosed,
    PeerClosed,
    RdmaError,
    ReceiveOverrun,
    VerbsError,
    WorkRequestError,
)
from aiordma.loop import Deadline, Loop, WaitQueue, refuse_forked_child
from aiordma.options import ConnectionOptions, PrivateDataLimits, check_private_data
from aiordma.qp.data_path import DataPath, EndpointCallbacks
from aiordma.qp.resources import translate_removal
from aiordma.rdmacm import ConnectionParameters
from aiordma.rdmacm.address import format_address
from aiordma.verbs import AsyncEvent

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)

# 0.64 ms. librdmacm leaves 0, which makes a sender that was early by a hair wait for 655 ms.
MIN_RNR_TIMER = 12
RAN_OUT_OF_RECEIVES = (
    "iWARP ended the connection, or the peer did, when no receive buffer was left ({}: recv_depth):"
    " messages came faster than this event loop took them, and some may be lost; have the peer "
    "wait for answers, or raise recv_depth"
)
# A device that has not flushed a queue pair by then has forgotten something.
FLUSH_SECONDS = 10.0
# On iWARP the connecting side has the first word: what comes before it is ready to hear, right
# behind the answer to its request, ends the connection. If it says nothing, it is ready by then.
FIRST_MESSAGE_SECONDS = 0.05
# iWARP may report the end of a connection a little before it has given the receive buffers back.
LATE_FLUSH_SECONDS = 0.1
# How long a queue pair that failed has for saying why, in the completion of a request.
CAUSE_SECONDS = 0.5


D_co = TypeVar("D_co", bound=DataPath, covariant=True)


class Endpoint(Generic[D_co]):
    """One end of a connection. All methods are for the loop's thread, but for abandon()."""

    def __init__(
        self,
        cm: AsyncCmId,
        options: ConnectionOptions,
        make_data_path: Callable[[EndpointCallbacks], D_co],
    ) -> None:
        """Take over `cm`, which is bound to a device; abort() destroys it too.

        `load` makes what the queue pair carries, for the owner that this is.

        Raises:
            ValueError: the options are more than the device can do.
        """
        self.device = cm.device()
        options.check_device(self.device)
        self.cm = cm
        self.options = options
        self.local_address, self.peer_address = cm.local_address, cm.peer_address
        self.peer_private_data = b""
        self._changed = WaitQueue(cm.loop)
        self._end: RdmaError | None = None
        self.closed_here = False
        """Whether this side has closed it."""
        self._is_complete = False
        self._flush_timer: Deadline | None = None
        self._failure_timer: Deadline | None = None
        self._drain_timer: Deadline | None = None
        self._first_message_timer: Deadline | None = None
        self._has_received = False
        self.data_path = make_data_path(self)
        cm.on_change = self._on_cm_change
        cm.handle.add_released_callback(self._release)

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
        answer = self.cm.established
        if answer is not None:
            self.peer_private_data = answer.private_data
            if not self.device.is_iwarp:  # which does not tell
                depth = min(depth, answer.initiator_depth)
        self._begin(depth)

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
        if self.device.is_iwarp:
            self.data_path.sends.pause()
        await self.cm.accept(self._parameters(private_data, resources, depth), self._prepare)
        if self.device.is_iwarp:
            self._first_message_timer = Deadline(
                self.cm.loop, FIRST_MESSAGE_SECONDS, self._no_first_message
            )
        self._begin(depth)

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
        self.data_path.prepare()

    def _begin(self, initiator_depth: int) -> None:
        """Both sides have agreed."""
        logger.debug("connected to %s", format_address(self.peer_address))
        self.data_path.negotiated(initiator_depth)
        qp = self.cm.handle.qp
        if qp is not None and not self.device.is_iwarp:
            self.cm.handle.submit(lambda: qp.set_min_rnr_timer(MIN_RNR_TIMER))

    # --- the middle ---

    @property
    def loop(self) -> Loop:
        """The event loop that the connection belongs to."""
        return self.cm.loop

    def acquire_domain(self) -> LoopDevice:
        """Take a reference to the protection domain of the loop's connections on the device."""
        return LoopDevice.of(self.cm.loop, self.device)

    @property
    def released(self) -> bool:
        """Whether it is on its way to be destroyed: nothing is left for the user to close."""
        return self.cm.state is CmState.CLOSED

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.closed_here or self._end is not None

    def check_open(self) -> None:
        """Raise why nothing can be sent any more, if that is so."""
        refuse_forked_child()
        if self.closed_here or self._end is not None:
            raise self.end_reason()

    def post_failed(self, error: VerbsError) -> RdmaError:
        """A request was refused, or memory for it: the first ends the connection."""
        if error.function != "ibv_post_send":
            return error
        gone = self.device.is_iwarp and error.errno == errno.ENOTCONN
        self.fail(PeerClosed(self._peer_closed()) if gone else error)
        return self.end_reason()

    def _peer_closed(self) -> str:
        return f"{format_address(self.peer_address)} closed the connection"

    @property
    def is_drained(self) -> bool:
        """Whether it has ended, and every message that arrived before has been seen."""
        if self._end is None or self._is_complete:
            return self._end is not None
        return self.data_path.counts_flushes and not self.data_path.receives_posted

    def end_reason(self) -> RdmaError:
        """Why the connection is of no use: each time a new exception, with its own traceback."""
        if self.closed_here or self._end is None:
            return LocalClosed("the connection is closed on this side")
        return copy.copy(self._end)

    # --- what the device says ---

    def message_arrived(self) -> None:
        """The peer has sent something: it has seen the connection made."""
        if self._has_received or self.released:  # nothing more is to be posted then
            return
        self._has_received = True
        self.data_path.resume()
        if self.cm.state is CmState.ACCEPTING:
            self.cm.notify_established()

    def _no_first_message(self) -> None:
        """The peer of an accepted iWARP connection has not said its first word in time.

        Or Linux's siw has not looked: what comes between its answer and its taking the connection
        over lies there until more comes. What the peer's device says to a read of no bytes is more.
        """
        if self.released:
            return
        self.data_path.resume()
        if self.device.attributes.is_siw and not (self._has_received or self.closed):
            self.data_path.probe()

    def request_completed(self) -> None:
        """One request less is on its way."""
        if self.closed_here:
            self._changed.wake_all()

    def request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        """The device reports a failed request, or one that was flushed."""
        if self._end is not None or self.closed_here:
            return
        failure = WorkRequestError(WcStatus(wc.status), opcode, wc.vendor_err)
        # On iWARP the kernel flushes before it reports the disconnect, which is about to come.
        if wc.status == WcStatus.WR_FLUSH_ERR and self.device.is_iwarp:
            self._fail_soon(failure)
        else:
            self.fail(failure)

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._expect_no_completions()
        self.fail(translate_removal(error))

    def queue_pair_event(self, event: AsyncEvent) -> None:
        """The device says something about the queue pair."""
        failure = failure_of(event)
        if event.type is AsyncEventType.COMM_EST and self.cm.state is CmState.ACCEPTING:
            self.cm.notify_established()
        elif failure is not None:
            self._fail_soon(failure)

    def _fail_soon(self, failure: RdmaError) -> None:
        """The completion of what failed, or the disconnect, say more, if they come."""
        if self._failure_timer is None:
            give_up = partial(self.fail, failure)
            self._failure_timer = Deadline(self.cm.loop, CAUSE_SECONDS, give_up)

    async def wait_ended(self) -> None:
        """Wait until it is known why a request that failed did, which is soon."""
        while not self.closed:
            await self._changed.wait()

    # --- the end ---

    def _on_cm_change(self) -> None:
        state = self.cm.state
        if state is CmState.DISCONNECTED:
            self.fail(PeerClosed(self._peer_closed()))
            if not self.data_path.counts_flushes:
                self.data_path.drain(self._all_received)
        elif state in (CmState.FAILED, CmState.REMOVED):
            self._expect_no_completions()
            failure = self.cm.failure(format_address(self.peer_address))
            self.fail(failure or RdmaError("the connection failed"))
        self._changed.wake_all()

    def fail(self, cause: RdmaError) -> None:
        """The connection is of no use any more, for this cause if there was none before."""
        if self._end is None:
            logger.debug("connection ended: %r", cause)
            self._end = cause
            self.cm.start_disconnect()
            self.data_path.stop()
            self._flush_timer = Deadline(self.cm.loop, FLUSH_SECONDS, self._expect_no_completions)
        self.data_path.wake()
        self._changed.wake_all()

    def _all_received(self) -> None:
        """Every message that ever arrived has been seen."""
        if self.device.is_iwarp:
            is_dry = isinstance(self._end, PeerClosed) and self.data_path.ran_out_of_receives
            if is_dry and self._drain_timer is None:
                on_notified = partial(self.data_path.drain, self._all_received)
                self._drain_timer = Deadline(self.cm.loop, LATE_FLUSH_SECONDS, on_notified)
                return
            if is_dry:
                # The device had no receive left: it was this side's that ended the connection.
                self._end = ReceiveOverrun(RAN_OUT_OF_RECEIVES.format(self.options.recv_depth))
            self._expect_no_completions()
        self._is_complete = True
        self.data_path.wake()

    def _expect_no_completions(self) -> None:
        """Whatever has not completed by now never will."""
        self._is_complete = True
        self.data_path.sends.stop_waiting()
        self.data_path.wake()

    async def aclose(self) -> None:
        """Let what is posted reach the peer, disconnect, and destroy everything."""
        if not self.closed_here:
            self._start_closing()
            try:
                await self._close_gracefully()
            finally:
                self.abort()
        await self.cm.handle.wait_destroyed()

    def _start_closing(self) -> None:
        self.closed_here = True
        self.data_path.stop()
        self._changed.wake_all()

    async def _close_gracefully(self) -> None:
        deadline = Deadline(self.cm.loop, self.options.close_timeout, self._changed.wake_all)
        try:
            await self._finish_sending(deadline)
            self.cm.start_disconnect()
            while self.cm.state is CmState.DISCONNECTING and not deadline.expired:
                await self._changed.wait()
        finally:
            deadline.cancel()

    async def _finish_sending(self, deadline: Deadline) -> None:
        """Wait until the peer's device has all that was posted."""
        sends = self.data_path.sends
        while self._is_up() and len(sends) and not deadline.expired:
            try:
                sends.signal_tail()
            except VerbsError as error:
                self.post_failed(error)
                return
            await self._changed.wait()

    def _is_up(self) -> bool:
        return self._end is None and self.cm.state is CmState.CONNECTED

    def abort(self) -> None:
        """End it at once; everything is destroyed in the background. Idempotent."""
        self._start_closing()
        self.cm.abort()

    def abandon(self) -> None:
        """abort() from any thread, when nobody can be waiting any more."""
        self.closed_here = True
        self.cm.abandon()

    def _release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.cm.on_change = None
        deadlines = (
            self._flush_timer,
            self._failure_timer,
            self._first_message_timer,
            self._drain_timer,
        )
        for deadline in deadlines:
            if deadline is not None:
                deadline.cancel()
        self.data_path.release()
