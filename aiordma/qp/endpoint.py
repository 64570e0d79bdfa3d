"""Endpoint: a connected id with its queue pair and its queues; how a connection begins and ends.

The dispatch tables refer to an endpoint as long as its queue pair exists. So the memory that the
device uses stays allocated even if the user drops the Connection.

How a connection ends: the first cause is stored (`_end`), which is the peer's disconnect, a failed
request or a removed device. Then the queue pair is moved to its error state, which flushes all
posted requests. Receives complete in order, so when the last one is flushed, all messages that ever
arrived were taken. Only then are the receiving tasks notified of the end.

iWARP is different. Its kernel flushes first, and reports the disconnect afterwards. A receive that
is posted in between never completes. So on iWARP all messages have been taken once the completion
queue was emptied after the report. The same holds for a shared receive queue, which is not flushed.
"""

from __future__ import annotations

import copy
import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from aiordma.cm import AsyncCmId, states
from aiordma.cm.failures import translate_removal
from aiordma.dispatch import MemoryDomain, failure_of
from aiordma.enums import AsyncEventType, IdOption, QpState, WcOpcode, WcStatus
from aiordma.errors import (
    LocalClosed,
    PeerClosed,
    PeerTimeout,
    RdmaError,
    ReceiveOverrun,
    VerbsError,
    WorkRequestError,
)
from aiordma.loop import Deadline, Loop, WaitQueue, refuse_forked_child
from aiordma.options import ConnectionOptions, PrivateDataLimits, check_private_data
from aiordma.qp.data_path import DataPath, EndpointCallbacks
from aiordma.qp.first_message import FirstMessage
from aiordma.qp.keepalive import Keepalive
from aiordma.qp.retries import finite_retries, retry_limit
from aiordma.rdmacm import ConnectionParameters, IdCalls
from aiordma.rdmacm.address import format_address
from aiordma.verbs import AsyncEvent, QueuePairAttributes

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

logger = logging.getLogger(__name__)

# The code for 0.64 ms. librdmacm uses 0, the code for 655 ms: a sender that finds no posted receive
# would wait that long.
MIN_RNR_TIMER = 12
RAN_OUT_OF_RECEIVES = (
    "iWARP or the peer ended the connection when no receive buffer was left (recv_depth is {}): "
    "messages arrived faster than this event loop took them, and some might be lost; make the peer "
    "wait for answers, or raise recv_depth"
)
_FAILED = frozenset({states.FAILED, states.REMOVED})
# A device that has not flushed a queue pair after this time will not flush the rest.
FLUSH_SECONDS = 10.0
# iWARP can report the end of a connection a short time before it has flushed the receives.
LATE_FLUSH_SECONDS = 0.1
# The time to wait for the completion that contains the reason why a queue pair failed.
CAUSE_SECONDS = 0.5

D_co = TypeVar("D_co", bound=DataPath, covariant=True)


class Endpoint(Generic[D_co]):
    """One end of a connection. All methods except abandon() are called on the loop's thread."""

    def __init__(
        self,
        cm: AsyncCmId,
        options: ConnectionOptions,
        make_data_path: Callable[[EndpointCallbacks], D_co],
    ) -> None:
        """Take ownership of `cm`, which is bound to a device; abort() destroys it too.

        `make_data_path` makes the data path of the queue pair. Its argument is this endpoint.

        Raises:
            ValueError: the options exceed the limits of the device.
            VerbsError: the device does not answer (EIO: it was removed).
        """
        self.device = cm.device()
        options.check_device(self.device, cm.port_num)
        self.cm = cm
        self._id_state = cm.id_state
        self.loop: Loop = cm.handle.loop
        """The event loop that the connection belongs to."""
        self.options = options
        self._addresses = cm.addresses
        self.peer_private_data = b""
        self._changed = WaitQueue(self.loop)
        self._end: RdmaError | None = None
        self.closed_here = False
        """True if this side has closed the connection."""
        self._is_complete = False
        self._is_destroyed = False
        self._unlink: Callable[[], None] | None = None
        """Called when everything is destroyed: see drop()."""
        self._has_begun = False
        self._flush_timer: Deadline | None = None
        self._failure_timer: Deadline | None = None
        self._drain_timer: Deadline | None = None
        self.data_path = make_data_path(self)
        self._first_message = FirstMessage(self.loop, self.device, self.data_path, self)
        self._keepalive: Keepalive | None = None
        cm.on_change = self._on_cm_change
        cm.handle.add_released_callback(self._release)

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._addresses.local

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._addresses.peer

    # --- the beginning ---

    async def connect(self, private_data: bytes) -> None:
        """Make the queue pair, connect, and wait until the peer has accepted.

        If the id has no route yet, it is resolved in between.

        Raises: see AsyncCmId.connect and resolve_route. After that the caller can only abort() the
        endpoint.
        """
        check_private_data(private_data, PrivateDataLimits.of(self.device).connect)
        limits, options = self.device.attributes, self.options
        resources = _lower(options.responder_resources, limits.max_qp_rd_atom)
        depth = _lower(options.initiator_depth, limits.max_qp_init_rd_atom)
        parameters = self._parameters(private_data, resources, depth)
        if self._id_state.current is states.ADDR_RESOLVED:
            calls = IdCalls(self.cm.handle.cm_id)
            if not self._add_prepare(calls):
                await self.cm.handle.call(self._prepare)
            await self.cm.resolve_and_connect(
                parameters, timeout=options.resolve_timeout, calls=calls
            )
        else:
            await self.cm.connect(parameters, self._prepare)
        reply = self._id_state.established
        if reply is not None:
            self.peer_private_data = reply.private_data
            if limits.is_siw:  # siw exchanges the numbers; other iWARP devices differ
                depth = _lower(depth, reply.responder_resources)
            elif not self.device.is_iwarp:
                depth = _lower(depth, reply.initiator_depth)
        self._begin(depth)

    async def accept(self, private_data: bytes) -> None:
        """Make the queue pair, accept the id's request, and wait until the peer has confirmed.

        Raises: see AsyncCmId.accept. After that the caller can only abort() the endpoint.
        """
        check_private_data(private_data, PrivateDataLimits.of(self.device).accept)
        request = self._id_state.request
        assert request is not None
        self.peer_private_data = request.private_data
        limits, options = self.device.attributes, self.options
        # The numbers in the event are for this side already: its responder_resources is the peer's
        # initiator_depth. iWARP refuses a number that is less than the request's.
        resources = _lower(request.responder_resources, limits.max_qp_rd_atom)
        if not self.device.is_iwarp:
            resources = _lower(resources, options.responder_resources)
        depth = _lower(request.initiator_depth, limits.max_qp_init_rd_atom)
        depth = _lower(depth, options.initiator_depth)
        self._first_message.expect()
        parameters = self._parameters(private_data, resources, depth)
        calls = IdCalls(self.cm.handle.cm_id)
        prepare = None if self._add_prepare(calls) else self._prepare
        limit = retry_limit(self.cm, request.retry_count)
        await self.cm.accept(parameters, prepare, limit, calls)
        self._first_message.confirmed()
        self._begin(depth)

    def _parameters(self, private_data: bytes, resources: int, depth: int) -> ConnectionParameters:
        return ConnectionParameters(
            private_data=private_data,
            responder_resources=resources,
            initiator_depth=depth,
            retry_count=finite_retries(self.device, self.options.retry_count),
            rnr_retry_count=self.options.rnr_retry_count,
        )

    def _prepare(self) -> None:
        """Make the queue pair and post its receives, in a worker thread."""
        self._set_ack_timeout()
        self.cm.cm_id.destroy_qp()  # one that rdma_create_ep() made
        self.data_path.prepare()

    def _add_prepare(self, calls: IdCalls) -> bool:
        """Add the calls that _prepare() makes to `calls`. Return False if it makes others, too."""
        if self.cm.handle.cm_id.has_qp or not self.data_path.add_prepare(calls):
            return False
        self._set_ack_timeout()
        return True

    def _set_ack_timeout(self) -> None:
        ack_timeout = self.options.ack_timeout
        if ack_timeout is not None:
            self.cm.cm_id.set_option(IdOption.ACK_TIMEOUT, ack_timeout)

    def _set_timer(self) -> None:
        """Set the time that the peer waits for a receive: it would be 655 ms. Not on iWARP.

        It takes as long as each of the two calls by which rdma_get_cm_event() moves a queue pair.
        """
        qp = self.cm.handle.cm_id.qp
        if qp is not None and not self.device.is_iwarp:
            try:
                qp.set_min_rnr_timer(MIN_RNR_TIMER)
            except VerbsError as error:
                logger.debug("ignored: %s", error)  # the peer has disconnected meanwhile

    def _begin(self, initiator_depth: int) -> None:
        """Start to use the connection: both sides have agreed."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("connected to %s", format_address(self.peer_address))
        self._has_begun = True
        if self._is_connected():  # else the peer has disconnected already
            self._set_timer()
        self.data_path.negotiated(initiator_depth)
        is_iwarp = self.device.is_iwarp
        if is_iwarp or self.options.keepalive:
            self._keepalive = Keepalive(self.loop, self.options, self.data_path, self)
            self._keepalive.start(is_iwarp=is_iwarp)

    # --- the middle ---

    def acquire_domain(self) -> MemoryDomain:
        """Add a user to the protection domain of the connection, and return the domain."""
        return self.data_path.acquire_domain()

    @property
    def released(self) -> bool:
        """True if the connection is being destroyed: the user need not close it."""
        return self._id_state.is_closed

    @property
    def may_be_read(self) -> bool:
        """True if the user can take what has arrived, now or after the connection has ended."""
        return self._has_begun and not self.closed_here

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""
        return self.closed_here or self._end is not None

    def check_open(self) -> None:
        """Raise the reason if nothing can be sent any more."""
        refuse_forked_child()
        if self.closed_here or self._end is not None:
            raise self.end_reason()

    def post_failed(self, error: VerbsError) -> RdmaError:
        """Return the exception for an unposted request. A refused one ends the connection."""
        if error.function != "ibv_post_send":
            return error
        disconnected = self.device.is_iwarp and error.errno == errno.ENOTCONN
        self.fail(PeerClosed(self._peer_closed()) if disconnected else error)
        return self.end_reason()

    @property
    def closed_by_peer(self) -> bool:
        """True if the connection has ended because the peer has closed it: end_reason() says so."""
        return isinstance(self._end, PeerClosed) and not self.closed_here

    def _peer_closed(self) -> str:
        return f"{format_address(self.peer_address)} closed the connection"

    @property
    def is_drained(self) -> bool:
        """True if the connection has ended and all messages that had arrived were taken."""
        if self._end is None or self._is_complete:
            return self._end is not None
        return self.data_path.counts_flushes and not self.data_path.receives_posted

    def end_reason(self) -> RdmaError:
        """Return the reason for the end: a new exception each time, as each gets a traceback."""
        if self.closed_here or self._end is None:
            return LocalClosed("the connection is closed on this side")
        return copy.copy(self._end)

    # --- completions and events of the device ---

    def message_arrived(self) -> None:
        """Note that a message has arrived: the peer has the connection established."""
        if self._first_message.has_arrived or self.released:  # released: nothing can be posted
            return
        self._first_message.arrived()
        if self._id_state.current is states.ACCEPTING:
            self.cm.notify_established()

    def request_completed(self) -> None:
        """Note that a request has completed."""
        if self.closed_here:
            self._changed.wake_all()

    def request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        """Handle the completion of a request that failed or was flushed."""
        if self._end is not None or self.closed_here:
            return
        failure: RdmaError = WorkRequestError(WcStatus(wc.status), opcode, wc.vendor_err)
        if wc.status == WcStatus.RETRY_EXC_ERR:
            peer = format_address(self.peer_address)
            failure = PeerTimeout(f"{peer} does not answer any more: {failure}")
        # The cause of a flush is reported soon. The kernel of iWARP flushes before it reports the
        # disconnect. librdmacm flushes while it reads the event of a late rejection. The request
        # that siw was sending when the TCP connection ended is not flushed: it has failed.
        if wc.status == WcStatus.WR_FLUSH_ERR or (
            wc.status == WcStatus.LOC_QP_OP_ERR and self.device.is_iwarp
        ):
            self._fail_soon(failure)
        else:
            self.fail(failure)

    def device_failed(self, error: VerbsError) -> None:
        """End the connection: the device is removed, and no completion will come any more."""
        self.fail(translate_removal(error))
        self._expect_no_completions()

    def queue_pair_event(self, event: AsyncEvent) -> None:
        """Handle an asynchronous event of the queue pair."""
        failure = failure_of(event)
        if event.type is AsyncEventType.COMM_EST and self._id_state.current is states.ACCEPTING:
            self.cm.notify_established()
        elif failure is not None:
            self._fail_soon(failure)

    def _fail_soon(self, failure: RdmaError) -> None:
        """Fail after CAUSE_SECONDS, unless a completion or a disconnect gives a better cause."""
        if self._failure_timer is None:
            end = partial(self._fail_unless_disconnected, failure)
            self._failure_timer = Deadline(self.loop, CAUSE_SECONDS, end)

    def _fail_unless_disconnected(self, failure: RdmaError) -> None:
        self.cm.dispatch_events()  # a busy loop can run timers before it reads the events
        if self._id_state.current is not states.DISCONNECTED:  # else _disconnected() follows
            self.fail(failure)

    async def wait_ended(self) -> None:
        """Wait until the reason for a failed request is known, which takes a short time."""
        while not self.closed:
            await self._changed.wait()

    # --- the end ---

    def _on_cm_change(self) -> None:
        state = self._id_state.current
        if state in _FAILED:
            failure = self.cm.failure(format_address(self.peer_address))
            self.fail(failure or RdmaError("the connection failed"))
            self._expect_no_completions()
        elif state is states.DISCONNECTED and not self.closed_here:  # else the cause is known
            # A failed request that has completed just before is the better cause.
            self.data_path.drain(self._disconnected)
        self._changed.wake_all()

    def _disconnected(self) -> None:
        if self._is_unlinked():  # it took many iterations of the loop to drain a busy queue
            return
        self.fail(PeerClosed(self._peer_closed()))
        if not self.data_path.counts_flushes:
            self._all_received()

    def fail(self, cause: RdmaError) -> None:
        """End the connection. The first cause is kept. Do nothing if it has no user any more."""
        if self._is_unlinked():
            return
        ends = self._end is None and not self.closed_here  # else aclose() does the rest
        if self._end is None:
            logger.debug("connection ended: %r", cause)
            self._end = cause
        if ends:
            self.data_path.stop()
            self._flush_timer = Deadline(self.loop, FLUSH_SECONDS, self._expect_no_completions)
        self.data_path.wake()
        self._changed.wake_all()
        if ends:  # after the rest, because a Ctrl-C can interrupt it
            self.cm.start_disconnect()

    def _all_received(self) -> None:
        """Notify the receivers of the end: all messages that ever arrived were taken."""
        if self._is_unlinked():
            return
        if self.device.is_iwarp:
            ran_out = isinstance(self._end, PeerClosed) and self.data_path.ran_out_of_receives
            if ran_out and self._drain_timer is None:
                drain_again = partial(self.data_path.drain, self._all_received)
                self._drain_timer = Deadline(self.loop, LATE_FLUSH_SECONDS, drain_again)
                return
            if ran_out:
                # No receive was left: it was this side's device that ended the connection.
                self._end = ReceiveOverrun(RAN_OUT_OF_RECEIVES.format(self.options.recv_depth))
            self._expect_no_completions()
        self._is_complete = True
        self.data_path.wake()

    def _expect_no_completions(self) -> None:
        """Stop waiting for completions: a request that has not completed by now never will.

        siw flushes no read that is under way when the connection ends. Only destroying the queue
        pair ends the device's use of its memory.
        """
        self._is_complete = True
        self.data_path.sends.stop_waiting()
        self.data_path.wake()
        if len(self.data_path.sends):
            self.cm.abort()

    def wake(self) -> None:
        """Let the tasks that wait for the end of the connection check it again."""
        self._changed.wake_all()

    async def aclose(self, deadline: Deadline | None = None) -> None:
        """Wait until all posted requests have completed, disconnect, and destroy everything.

        `deadline`: the time for closing, if it runs already. At its end it calls wake().
        """
        if not self.closed_here:
            self._start_closing()
            if self._id_state.current in (states.CONNECTED, states.DISCONNECTING):
                deadline = deadline or Deadline(self.loop, self.options.close_timeout, self.wake)
                try:
                    await self._close_gracefully(deadline)
                finally:
                    deadline.cancel()
                    self.abort()
            else:
                self.abort()
        await self.cm.handle.wait_destroyed()

    def _start_closing(self) -> None:
        if not self.closed_here:
            self.closed_here = True
            self.data_path.stop()
            self._changed.wake_all()

    async def _close_gracefully(self, deadline: Deadline) -> None:
        await self._finish_sending(deadline)
        if self._id_state.current is states.CONNECTED:
            self.cm.start_disconnect()
        is_silent = isinstance(self._end, PeerTimeout)
        while self._id_state.current is states.DISCONNECTING and not (
            deadline.expired or is_silent
        ):
            await self._changed.wait()

    async def _finish_sending(self, deadline: Deadline) -> None:
        """Wait until all posted requests have reached the peer's device."""
        sends = self.data_path.sends
        while self._is_connected() and len(sends) and not deadline.expired:
            try:
                sends.signal_tail()
            except VerbsError as error:
                self.post_failed(error)
                return
            await self._changed.wait()

    def _is_connected(self) -> bool:
        return self._end is None and self._id_state.current is states.CONNECTED

    def abort(self) -> None:
        """End the connection at once, and destroy everything in the background. Idempotent."""
        if not self._is_unlinked():
            self._start_closing()
            self.data_path.wake()  # no completion will wake the waiting tasks
        self.cm.abort()

    def refuse_access(self) -> None:
        """Have the device refuse what the peer reads and writes: ibv_modify_qp(3).

        The connection cannot be used any more. abort() itself only begins to destroy it.
        """
        qp = self.cm.handle.cm_id.qp
        if qp is not None and not self.released:
            with suppress(VerbsError):  # the device was removed
                qp.modify(QueuePairAttributes.to_state(QpState.ERR))

    def abandon(self) -> None:
        """Abort from any thread, when no task can be waiting any more."""
        self.closed_here = True
        self.cm.abandon()

    def _release(self) -> None:
        """Release the shared resources. The queue pair is destroyed."""
        self.cm.on_change = None
        for timer in filter(None, (self._flush_timer, self._failure_timer, self._drain_timer)):
            timer.cancel()
        self._first_message.stop()
        if self._keepalive is not None:
            self._keepalive.stop()
        self.data_path.release()
        self._is_destroyed = True
        self._unlink_if_destroyed()

    def drop(self, unlink: Callable[[], None]) -> None:
        """Call `unlink` when everything is destroyed: the user has dropped the connection.

        Callable from any thread. The objects of a connection refer to each other. Without this they
        would stay until the garbage collector finds them.
        """
        self._unlink = unlink
        self._unlink_if_destroyed()

    def _is_unlinked(self) -> bool:
        """Return True if everything is destroyed, and the user has dropped the connection."""
        return "data_path" not in vars(self)

    def _unlink_if_destroyed(self) -> None:
        unlink = self._unlink
        if self._is_destroyed and unlink is not None:
            unlink()
            self._keepalive = self._unlink = None
            for name in ("data_path", "_first_message"):
                vars(self).pop(name, None)  # the loop and a thread that drops can both be here


def _lower(first: int, second: int) -> int:
    """Return the lower number, in fewer instructions than min(): see states.py."""
    return first if first < second else second
