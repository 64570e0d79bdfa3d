"""CmSteps: the steps of an id's life, written once for both modes."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from aiordma.cm.failures import error_for_event, error_for_iwarp_connect
from aiordma.cm.handle import IdHandle
from aiordma.cm.queues import CmQueues
from aiordma.cm.states import FINAL, WAITING, CmCall, CmState, after_call
from aiordma.cm.step import Place, Step
from aiordma.enums import CmEventType, IbOption, IdOption, JoinFlags
from aiordma.errors import ConnectError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import checkpoint
from aiordma.rdmacm import CmEvent, ConnectionParameters, Ece, SocketAddress
from aiordma.rdmacm.address import format_address
from aiordma.verbs import Device

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT = 5.0
# What join_multicast() gives along, and finds again in its event.
_tokens = itertools.count(1)

# Where connect() and accept() may lead. A peer may be done, and have disconnected, before this
# side's task has run again; without a queue pair, the rest is to be done by hand.
_CONNECTED = (CmState.CONNECTED, CmState.DISCONNECTED, CmState.RESPONDED)


class CmSteps(CmQueues, ABC):
    """What AsyncCmId and SyncCmId have in common.

    Every await may be cancelled: the id then stands in the middle of what was asked, and is only
    good to be closed. One task at a time may wait for an id.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        super().__init__(handle, state, event)
        self._joining: dict[int, CmEvent | None] = {}

    def handle_event(self, event: CmEvent) -> None:
        """Take note of an event."""
        if event.context in self._joining:
            self._joining[event.context] = event
        super().handle_event(event)

    @abstractmethod
    async def _take(self, step: Step, is_done: Callable[[], bool]) -> None:
        """Make the call, and wait for events until `is_done()`."""

    async def _move(self, step: Step, peer: str, *wanted: CmState) -> None:
        """Take a step until nothing is under way; the id must then stand in a state `wanted`."""
        await self._take(step, lambda: self.state not in WAITING)
        if self.state not in wanted:
            raise self._error(peer, wanted[0])

    # --- what it is ---

    def device(self) -> Device:
        """The device that the id is bound to.

        Raises:
            ValueError: it is bound to none yet.
            LocalClosed: it is closed.
        """
        self._check_open()
        return self.cm_id.device()

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before there is one."""
        return 0 if self.state is CmState.CLOSED else self.cm_id.port_num

    # --- options ---

    def set_option(self, option: IdOption, value: int) -> None:
        """Set an option: rdma_set_option(3).

        Raises:
            VerbsError: EINVAL (too late for it, or not on this kind of id), ENOSYS.
        """
        self._check_open()
        self.cm_id.set_option(option, value)

    def set_local_ece(self, ece: Ece) -> None:
        """Offer options to the peer's card, before create_qp(): rdma_set_local_ece(3).

        Raises:
            VerbsError: EINVAL (there is a queue pair).
        """
        self._check_open()
        self.cm_id.set_local_ece(ece)

    def remote_ece(self) -> Ece:
        """What the peer's card offered, before create_qp(): rdma_get_remote_ece(3).

        Raises:
            VerbsError: EINVAL (there is a queue pair).
        """
        self._check_open()
        return self.cm_id.remote_ece()

    # --- finding the way ---

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 picks one: rdma_bind_addr(3).

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken, or not this machine's), EACCES.
        """
        self._call_now(CmCall.BIND_ADDR, lambda: self.cm_id.bind_addr(address))

    async def resolve_addr(
        self,
        destination: SocketAddress,
        *,
        source: SocketAddress | None = None,
        timeout: float = RESOLVE_TIMEOUT,
    ) -> None:
        """Find the device and the link address for `destination`: rdma_resolve_addr(3).

        Gives up after `timeout` seconds; may then be tried again.

        Raises:
            AddressError: no device leads there, or nobody has the address.
        """
        peer = destination.pair[0]
        step = Step(
            CmCall.RESOLVE_ADDR,
            lambda: self.cm_id.resolve_addr(source, destination, _milliseconds(timeout)),
            Place.LOOP,
            translate=lambda error: _query_error(CmEventType.ADDR_ERROR, error, peer),
        )
        await self._move(step, peer, CmState.ADDR_RESOLVED)

    async def resolve_route(self, *, timeout: float = RESOLVE_TIMEOUT) -> None:
        """Find the route to the resolved address: rdma_resolve_route(3), in a worker thread.

        Gives up after `timeout` seconds; may then be tried again.

        Raises:
            RouteError: there is none.
        """
        await self._find_route(
            lambda: self.cm_id.resolve_route(_milliseconds(timeout)), Place.PARKED
        )

    async def set_path(self, path: bytes) -> None:
        """Use a route that is known already, in place of resolve_route().

        `path` is an array of `struct ibv_path_data`: rdma_set_option(3), RDMA_OPTION_IB_PATH.

        Raises:
            RouteError: it is not accepted (EINVAL: no such path, or no InfiniBand or RoCE).
        """
        await self._find_route(lambda: self.cm_id.set_option(IbOption.PATH, path), Place.LOOP)

    async def _find_route(self, start: Callable[[], None], place: Place) -> None:
        peer = self.peer_address[0]
        step = Step(
            CmCall.RESOLVE_ROUTE,
            start,
            place,
            translate=lambda error: _query_error(CmEventType.ROUTE_ERROR, error, peer),
        )
        await self._move(step, peer, CmState.ROUTE_RESOLVED)

    # --- connecting ---

    async def connect(
        self,
        parameters: ConnectionParameters | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect along the resolved route: rdma_connect(3), in a worker thread.

        `prepare` is called first, in the same thread: the place to make the queue pair and to post
        the first receives. Without `parameters`, everything is as much as the device can.

        An id without a queue pair stops at the peer's answer: move yours by hand, as init_qp_attr()
        says, and call establish(). Of a datagram id, `established` then says where to send.

        Raises:
            Rejected: nobody listens there, or the application refused.
            Unreachable: nobody answered (after about a minute on InfiniBand and RoCE).
            ConnectError: it failed otherwise.
            VerbsError: a parameter is over a limit of the device.
        """
        self._allowed(CmCall.CONNECT)
        peer = format_address(self.peer_address)
        self.handle.slow = iwarp = self.device().is_iwarp
        step = Step(
            CmCall.CONNECT,
            lambda: self.cm_id.connect(parameters),
            Place.PARKED if iwarp else Place.WORKER,
            prepare,
            lambda error: error_for_iwarp_connect(error, peer) if iwarp else error,
        )
        await self._move(step, peer, *_CONNECTED)

    def establish(self) -> None:
        """Confirm the connection of a queue pair that was moved by hand: rdma_establish(3).

        Raises:
            VerbsError: EINVAL.
            RdmaError: the peer has not answered.
        """
        self._call_now(CmCall.ESTABLISH, self.cm_id.establish)

    def notify_established(self) -> None:
        """Data has come before the peer's confirmation: rdma_notify(3). Then it need not come."""
        try:
            self.cm_id.notify()
        except VerbsError as error:  # EISCONN: the confirmation was faster
            logger.debug("ignored: %s", error)

    # --- being connected to ---

    async def accept(
        self,
        parameters: ConnectionParameters | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Accept the request: rdma_accept(3), in a worker thread. `prepare`: see connect().

        Returns when the peer has confirmed; for datagrams, at once. Once begun the request cannot
        be rejected any more. Without `parameters` (which needs a queue pair): as the peer asked.

        Raises:
            ConnectError: the peer is gone, or did not confirm.
        """
        peer = format_address(self.peer_address)
        is_datagram = self.state is CmState.REQUESTED and self.cm_id.is_datagram
        step = Step(
            CmCall.ACCEPT,
            lambda: self.cm_id.accept(parameters),
            Place.WORKER,
            lambda: self._prepare_answer(prepare, peer),
            lambda error: ConnectError(f"{peer} could not be accepted: {error}"),
        )
        if is_datagram:
            await self._take(step, lambda: True)
            if self.state is CmState.ACCEPTING:
                self.state = CmState.CONNECTED  # no event will say so
        else:
            await self._move(step, peer, *_CONNECTED)

    def _prepare_answer(self, prepare: Callable[[], None], peer: str) -> None:
        """Prepare to accept. Of a peer that gave up meanwhile, nothing tells but that it fails."""
        try:
            prepare()
        except VerbsError as error:
            try:
                self.cm_id.reject()
            except VerbsError:
                raise ConnectError(f"{peer} gave up before it was accepted") from error
            raise

    def reject(self, private_data: bytes = b"", *, ece: bool = False) -> None:
        """Refuse the request, telling the peer why: rdma_reject(3). The id remains to be closed.

        `ece`: because of the options that its card offered, rdma_reject_ece(3). A peer that went
        away meanwhile is no error.

        Raises:
            LocalClosed: it was answered already.
        """
        try:
            self._call_now(CmCall.REJECT, lambda: self.cm_id.reject(private_data, ece=ece))
        except VerbsError as error:
            logger.debug("the peer is gone: %s", error)
            self.state = CmState.REFUSED

    def check_unanswered(self) -> None:
        """Make sure that this is a request that was neither accepted nor rejected.

        Raises:
            LocalClosed: it was.
            ConnectError: the peer gave up, or the device went away; the id is closed then.
        """
        if self.state is CmState.REQUESTED:
            return
        peer = format_address(self.peer_address)
        failure = self.failure(peer)
        if self.state not in FINAL or failure is None:
            raise LocalClosed("the request was answered already")
        self.abort()
        if isinstance(failure, ConnectError):
            raise failure
        raise ConnectError(f"{peer} can no longer be answered: {failure}") from failure

    # --- the end ---

    async def disconnect(self) -> None:
        """Disconnect, or confirm that the peer did, and wait until it is so: rdma_disconnect(3).

        The queue pair goes to its error state, and what is posted on it is flushed. A peer that
        does not answer keeps this waiting (about a minute on InfiniBand and RoCE). Cancelling
        stops the waiting only.

        Raises:
            RdmaError: there is no connection; datagrams have none.
        """
        if self.state is not CmState.CLOSED and self.cm_id.is_datagram:
            raise RdmaError("datagrams have no connection to end")
        if self.state is CmState.DISCONNECTED:
            self.start_disconnect()
            await checkpoint()
            return
        step = Step(CmCall.DISCONNECT, self._disconnect, Place.WORKER)
        await self._take(step, lambda: self.state is not CmState.DISCONNECTING)

    def _disconnect(self) -> None:
        try:
            with self.handle.channel_lock:
                self.cm_id.disconnect()
        except VerbsError as error:
            # iWARP, and the peer was faster: its disconnect is on the way here.
            logger.debug("ignored: %s", error)

    def start_disconnect(self) -> None:
        """disconnect() in the background, if there is a connection; nothing else happens if not."""
        state = after_call(self.state, CmCall.DISCONNECT)
        if state is not None and not self.cm_id.is_datagram:
            self.state = state
            self.handle.submit(self._disconnect)

    # --- multicast ---

    async def join_multicast(
        self, group: SocketAddress, flags: JoinFlags = JoinFlags.FULLMEMBER
    ) -> CmEvent:
        """Join a group: rdma_join_multicast(3) or, for flags, rdma_join_multicast_ex(3).

        The id must be bound to a device, and carry datagrams. Its queue pair, if it has one, then
        gets what is sent to the group. The event says where to send: `ah_attr`, `qp_num`, `qkey`.
        Cancelling leaves the id joined, or about to be, until it is closed.

        Raises:
            ConnectError: the group could not be joined.
            VerbsError: EINVAL (wrong state), ENOSYS (iWARP has none), EOPNOTSUPP.
        """
        self._check_open()
        token = next(_tokens)
        self._joining[token] = None
        step = Step(None, lambda: self._join(group, token, flags), Place.LOOP)
        try:
            await self._take(step, lambda: self._joining[token] is not None or self.state in FINAL)
            event = self._joining[token]
        finally:
            del self._joining[token]
        if event is None:
            raise self._error(group.host, CmState.ADDR_BOUND)
        if event.type is not CmEventType.MULTICAST_JOIN or event.status:
            raise error_for_event(event, group.host)
        return event

    def _join(self, group: SocketAddress, token: int, flags: JoinFlags) -> None:
        cm_id = self.cm_id
        # A queue pair that is attached to a group cannot be destroyed, and librdmacm keeps a record
        # of each group until it is left. The lambda must not hold this object.
        self.handle.before_destroyed(group, lambda: cm_id.leave_multicast(group))
        cm_id.join_multicast(group, token, flags)

    async def leave_multicast(self, group: SocketAddress) -> None:
        """Leave a group: rdma_leave_multicast(3), in a worker thread.

        Raises:
            VerbsError: EADDRNOTAVAIL (not joined).
        """
        self._check_open()
        self.handle.not_before_destroyed(group)

        def leave() -> None:
            with self.handle.channel_lock:
                self.cm_id.leave_multicast(group)

        await self.handle.call(leave)


def _query_error(kind: CmEventType, error: VerbsError, peer: str) -> Exception:
    """A query that failed at once is no different from one that fails later."""
    failure = error_for_event(CmEvent(kind, 0, status=-(error.errno or 1)), peer)
    failure.__cause__ = error
    return failure


def _milliseconds(seconds: float) -> int:
    # rdma_resolve_route() refuses 0.
    return max(1, min(round(seconds * 1000), 2**31 - 1))
