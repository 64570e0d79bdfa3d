"""BaseCmId: the operations of an id, for AsyncCmId and SyncCmId alike.

Each operation is a Step: the C call that starts something, and the meaning of its failure. The two
subclasses differ in how they wait for the end of a step.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiordma.cm.failures import error_for_event, error_for_iwarp_connect
from aiordma.cm.handle import IdHandle
from aiordma.cm.id_state import IdState
from aiordma.cm.own_completions import OwnCompletions
from aiordma.cm.pending_requests import MAX_BACKLOG, PendingRequests
from aiordma.cm.states import FINAL, WAITING, CmCall, CmState, after_call
from aiordma.cm.step import Executor, Step
from aiordma.enums import CmEventType, IbOption, IdOption, JoinFlags, QpState, SrqType
from aiordma.errors import ConnectError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import Loop, checkpoint
from aiordma.loop.context_managers import AsyncContextManagerMixin
from aiordma.rdmacm import (
    CmEvent,
    CmId,
    ConnectionParameters,
    Ece,
    Route,
    SocketAddress,
    device_contexts,
)
from aiordma.rdmacm.address import format_address
from aiordma.verbs import (
    Completion,
    Device,
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

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT = 5.0
# join_multicast() passes a token to the kernel, and finds it again in the event.
_tokens = itertools.count(1)

# connect() and accept() can lead to these. The peer might have disconnected before this task runs.
# Without a queue pair, the user moves one by hand.
_CONNECTED = (CmState.CONNECTED, CmState.DISCONNECTED, CmState.RESPONDED)


class BaseCmId(AsyncContextManagerMixin, ABC):
    """A communication identifier whose operations are awaited, in either mode.

    Every await may be cancelled. The id then stands in the middle of the operation, and can only be
    closed. One task at a time may wait for an id.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        self.handle = handle
        self.context: object = None
        """An object of the user's own."""
        self._state = IdState(state, event)
        self._completions = OwnCompletions(handle, self._state)
        self._requests = PendingRequests()
        self._has_listened = state is CmState.LISTENING
        self._joining: dict[int, CmEvent | None] = {}
        self._last_addresses = (("", 0), ("", 0))
        self._is_moved = False

    # --- properties ---

    @property
    def state(self) -> CmState:
        """The state of the id. See `aiordma.cm.states`."""
        return self._state.current

    @property
    def event(self) -> CmEvent | None:
        """The last event. It holds the peer's private data until the next event arrives."""
        return self._state.event

    @property
    def established(self) -> CmEvent | None:
        """The event that reported the connection. It holds the peer's answer to connect()."""
        return self._state.established

    @property
    def loop(self) -> Loop:
        """The event loop that the id belongs to."""
        return self.handle.loop

    @property
    def cm_id(self) -> CmId:
        """The C id. Its `post_*` calls do not block and may be made directly."""
        return self.handle.cm_id

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side; `("", 0)` before the id has an address."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[0]
        address = self.cm_id.local_address
        return address.pair if address is not None else ("", 0)

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the other side; `("", 0)` before it is known."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[1]
        address = self.cm_id.peer_address
        return address.pair if address is not None else ("", 0)

    @property
    def route(self) -> Route:
        """The route to the peer, as far as it is resolved.

        Raises:
            LocalClosed: the id is closed.
        """
        self._state.check_open()
        return self.cm_id.route

    def device(self) -> Device:
        """The device that the id is bound to.

        Raises:
            ValueError: it is bound to none yet.
            LocalClosed: it is closed.
        """
        self._state.check_open()
        return self.cm_id.device()

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before there is one."""
        return 0 if self.state is CmState.CLOSED else self.cm_id.port_num

    # --- events and steps ---

    def handle_event(self, event: CmEvent) -> None:
        """Take an rdma_cm event, which may move the state."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._requests.add(self.handle, event, is_listening=self.state is CmState.LISTENING)
            self._drop_requests_if_closed()
        if event.context in self._joining:
            self._joining[event.context] = event
        if event.type is CmEventType.DEVICE_REMOVAL:
            device_contexts.check_soon()
        self._state.on_event(event)
        self._completions.on_event()

    @abstractmethod
    async def _perform(self, step: Step, is_done: Callable[[], bool]) -> None:
        """Make the call of `step`, and wait for events until `is_done()`."""

    async def _perform_to(self, step: Step, peer: str, *wanted: CmState) -> None:
        """Take a step until nothing is under way.

        Raises:
            RdmaError: the id is then in none of the states `wanted`.
        """
        await self._perform(step, lambda: self.state not in WAITING)
        if self.state not in wanted:
            raise self._state.error(peer, wanted[0])

    def failure(self, peer: str) -> RdmaError | None:
        """Return the reason why the id, or its last query, failed; None if neither did."""
        return self._state.failure(peer)

    # --- options ---

    def set_option(self, option: IdOption, value: int) -> None:
        """Set an option: rdma_set_option(3).

        Raises:
            VerbsError: EINVAL (too late for it, or not on this kind of id), ENOSYS.
        """
        self._state.check_open()
        self.cm_id.set_option(option, value)

    def set_local_ece(self, ece: Ece) -> None:
        """Offer options to the peer's card, before create_qp(): rdma_set_local_ece(3).

        Raises:
            VerbsError: EINVAL (there is a queue pair).
        """
        self._state.check_open()
        self.cm_id.set_local_ece(ece)

    def remote_ece(self) -> Ece:
        """What the peer's card offered, before create_qp(): rdma_get_remote_ece(3).

        Raises:
            VerbsError: EINVAL (there is a queue pair).
        """
        self._state.check_open()
        return self.cm_id.remote_ece()

    # --- finding the way ---

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 picks one: rdma_bind_addr(3).

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken, or not this machine's), EACCES.
        """
        self._state.call(CmCall.BIND_ADDR, lambda: self.cm_id.bind_addr(address))

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
            Executor.LOOP,
            translate=lambda error: _query_error(CmEventType.ADDR_ERROR, error, peer),
        )
        await self._perform_to(step, peer, CmState.ADDR_RESOLVED)

    async def resolve_route(self, *, timeout: float = RESOLVE_TIMEOUT) -> None:
        """Find the route to the resolved address: rdma_resolve_route(3), in a worker thread.

        Gives up after `timeout` seconds; may then be tried again.

        Raises:
            RouteError: there is none.
        """
        await self._find_route(
            lambda: self.cm_id.resolve_route(_milliseconds(timeout)), Executor.BLOCKING_POOL
        )

    async def set_path(self, path: bytes) -> None:
        """Use a route that is known already, in place of resolve_route().

        `path` is an array of `struct ibv_path_data`: rdma_set_option(3), RDMA_OPTION_IB_PATH.

        Raises:
            RouteError: it is not accepted (EINVAL: no such path, or no InfiniBand or RoCE).
        """
        await self._find_route(lambda: self.cm_id.set_option(IbOption.PATH, path), Executor.LOOP)

    async def _find_route(self, start: Callable[[], None], executor: Executor) -> None:
        peer = self.peer_address[0]
        step = Step(
            CmCall.RESOLVE_ROUTE,
            start,
            executor,
            translate=lambda error: _query_error(CmEventType.ROUTE_ERROR, error, peer),
        )
        await self._perform_to(step, peer, CmState.ROUTE_RESOLVED)

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
        self._state.check_allowed(CmCall.CONNECT)
        peer = format_address(self.peer_address)
        self.handle.is_slow_to_destroy = iwarp = self.device().is_iwarp
        step = Step(
            CmCall.CONNECT,
            lambda: self.cm_id.connect(parameters),
            Executor.BLOCKING_POOL if iwarp else Executor.WORKER_POOL,
            prepare,
            lambda error: error_for_iwarp_connect(error, peer) if iwarp else error,
        )
        await self._perform_to(step, peer, *_CONNECTED)

    def establish(self) -> None:
        """Confirm the connection of a queue pair that was moved by hand: rdma_establish(3).

        Raises:
            VerbsError: EINVAL.
            RdmaError: the peer has not answered.
        """
        self._state.call(CmCall.ESTABLISH, self.cm_id.establish)

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
            Executor.WORKER_POOL,
            lambda: self._prepare_answer(prepare, peer),
            lambda error: ConnectError(f"{peer} could not be accepted: {error}"),
        )
        if is_datagram:
            await self._perform(step, lambda: True)
            if self.state is CmState.ACCEPTING:
                self._state.current = CmState.CONNECTED  # no event will say so
        else:
            await self._perform_to(step, peer, *_CONNECTED)

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
            self._state.call(CmCall.REJECT, lambda: self.cm_id.reject(private_data, ece=ece))
        except VerbsError as error:
            logger.debug("the peer is gone: %s", error)
            self._state.current = CmState.REFUSED

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

    # --- listening ---

    def listen(self, backlog: int = 0) -> None:
        """Listen: rdma_listen(3). At most `backlog` requests wait to be taken (0: 1024).

        A request that arrives when `backlog` requests wait is rejected.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken), EMFILE (listening takes a descriptor).
            BusyError: a call on the id is under way.
        """
        self._state.call(CmCall.LISTEN, lambda: self._listen(backlog))
        self._has_listened = True
        self._requests.backlog = backlog if 0 < backlog < MAX_BACKLOG else MAX_BACKLOG

    def _listen(self, backlog: int) -> None:
        self.cm_id.listen(backlog)

    def _check_listening(self) -> None:
        if self.state is not CmState.LISTENING:
            raise self._state.error("the listener", CmState.LISTENING)

    def _drop_requests_if_closed(self) -> None:
        """Drop a request that arrived while another thread closed the id."""
        if self.state is CmState.CLOSED:
            self._requests.drop_all()

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
        self._state.check_open()
        return await self.handle.call(lambda: self.make_qp(init, pd))

    def make_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """What create_qp() does. Blocks, so call it in a worker thread: inside `prepare`."""
        if pd is None:
            self.handle.acquire_context()
        with self.handle.channel_lock:
            return self.cm_id.create_qp(init, pd)

    def init_qp_attr(self, state: QpState) -> QueuePairAttributes:
        """What a queue pair made by hand needs to go to `state`: rdma_init_qp_attr(3).

        Raises:
            VerbsError: EINVAL (the id is not so far).
        """
        self._state.check_open()
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
        self._state.check_open()

        def create() -> SharedReceiveQueue:
            if pd is None:
                self.handle.acquire_context()
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
        self._state.check_open()

        def call() -> Registration:
            self.handle.acquire_context()
            registration = register()
            self.handle.add_destroyed_callback(registration.close)
            return registration

        return await self.handle.call(call)

    # --- completions ---

    async def get_send_comp(self) -> Completion:
        """Wait for the next completion of the id's own send queue: rdma_get_send_comp(3).

        Waits in a worker thread. Cancelling loses no completion. A failed request does not raise
        here: see `Completion.check`. When the peer disconnects during the wait, this side
        disconnects too. The device then flushes the posted requests, which ends the wait.

        Raises:
            LocalClosed: the id is closed, or was while waiting.
            DeviceRemoved: the device went away.
            ValueError: the id has no completion queue of its own for sending.
            BusyError: another task waits here.
            VerbsError: the queue is broken.
        """
        self._state.check_open()
        return await self._completions.next_sent(self.cm_id.send_queue(), self)

    async def get_recv_comp(self) -> Completion:
        """Wait for the next completion of its own receive queue: rdma_get_recv_comp(3).

        As get_send_comp() otherwise.
        """
        self._state.check_open()
        return await self._completions.next_received(self.cm_id.recv_queue(), self)

    def event_fds(self) -> list[int]:
        """Return the descriptors where rdma_cm events arrive that no loop reads."""
        return []

    def read_events(self) -> None:
        """Read the events that have arrived there. Called in a worker thread."""

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
        self._state.check_open()
        token = next(_tokens)
        self._joining[token] = None
        step = Step(None, lambda: self._join(group, token, flags), Executor.LOOP)
        try:
            await self._perform(
                step, lambda: self._joining[token] is not None or self.state in FINAL
            )
            event = self._joining[token]
        finally:
            del self._joining[token]
        if event is None:
            raise self._state.error(group.host, CmState.ADDR_BOUND)
        if event.type is not CmEventType.MULTICAST_JOIN or event.status:
            raise error_for_event(event, group.host)
        return event

    def _join(self, group: SocketAddress, token: int, flags: JoinFlags) -> None:
        cm_id = self.cm_id
        # A queue pair that is attached to a group cannot be destroyed, and librdmacm keeps a record
        # of each group until it is left. The lambda must not hold this object.
        self.handle.add_pre_destroy_hook(group, lambda: cm_id.leave_multicast(group))
        cm_id.join_multicast(group, token, flags)

    async def leave_multicast(self, group: SocketAddress) -> None:
        """Leave a group: rdma_leave_multicast(3), in a worker thread.

        Raises:
            VerbsError: EADDRNOTAVAIL (not joined).
        """
        self._state.check_open()
        self.handle.remove_pre_destroy_hook(group)

        def leave() -> None:
            with self.handle.channel_lock:
                self.cm_id.leave_multicast(group)

        await self.handle.call(leave)

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
        step = Step(CmCall.DISCONNECT, self._disconnect, Executor.WORKER_POOL)
        await self._perform(step, lambda: self.state is not CmState.DISCONNECTING)

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
            self._state.current = state
            self.handle.submit(self._disconnect)

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that no task has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        self.abandon()

    def abandon(self) -> None:
        """Close at once without waking waiters. Callable from any thread. Idempotent."""
        if self.state is not CmState.CLOSED:
            self._leave()
            self.handle.destroy()
        self._requests.drop_all()

    def _leave(self) -> None:
        """Stop using the C id, which is about to be destroyed or to get another owner."""
        self._last_addresses = self.local_address, self.peer_address
        self._state.close()

    def _transfer_to(self, successor: BaseCmId) -> None:
        """Hand over to `successor`, which migrate() has made for the same C id."""
        successor.context = self.context
        self._state.copy_to(successor._state)
        self._requests.move_to(successor._requests)
        successor._has_listened = self._has_listened
        self._leave()
        self._is_moved = True

    async def aclose(self) -> None:
        """abort(), and wait until everything is destroyed. Idempotent.

        Cancelling stops the waiting only.
        """
        self.abort()
        if self._is_moved:
            await checkpoint()
        else:
            await self.handle.wait_destroyed()

    @asynccontextmanager
    async def closed_on_failure(self) -> AsyncIterator[None]:
        """Close the id if the block fails.

        Nothing of a failed attempt is left when its error arrives. A block that is cancelled does
        not wait for that.
        """
        try:
            yield
        except Exception:
            await self.aclose()
            raise
        except BaseException:
            self.abort()
            raise

    def __del__(self) -> None:
        if not hasattr(self, "_is_moved") or self.state is CmState.CLOSED:
            return
        name = repr(self)
        self.abandon()
        warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.name} at {id(self):#x}>"


def _query_error(kind: CmEventType, error: VerbsError, peer: str) -> Exception:
    """A query that failed at once is no different from one that fails later."""
    failure = error_for_event(CmEvent(kind, 0, status=-(error.errno or 1)), peer)
    failure.__cause__ = error
    return failure


def _milliseconds(seconds: float) -> int:
    # rdma_resolve_route() refuses 0.
    return max(1, min(round(seconds * 1000), 2**31 - 1))
