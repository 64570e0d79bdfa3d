"""BaseCmId: the operations of an id, for both AsyncCmId and SyncCmId.

Each operation is a Step: the C call that starts it, and the exception for a failure of that call.
The two subclasses differ in how they wait for the end of a step.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.cm import states
from aiordma.cm.failures import (
    error_for_event,
    error_for_iwarp_connect,
    translate_removal,
)
from aiordma.cm.handle import IdHandle
from aiordma.cm.id_state import IdState
from aiordma.cm.own_completions import OwnCompletions
from aiordma.cm.pending_requests import MAX_BACKLOG, PendingRequests
from aiordma.cm.states import FINAL, WAITING, CmState, after_call
from aiordma.cm.step import Step
from aiordma.enums import CmEventType, IbOption, IdOption, JoinFlags, QpState, SrqType
from aiordma.errors import ConnectError, LocalClosed, RdmaError, VerbsError
from aiordma.loop import (
    Loop,
    WorkerPool,
    blocking_pool,
    checkpoint,
    worker_pool,
)
from aiordma.loop.context_managers import AsyncContextManagerMixin
from aiordma.options import DATAGRAM_LIMITS, PrivateDataLimits, check_private_data
from aiordma.rdmacm import (
    CmEvent,
    CmId,
    ConnectionParameters,
    Ece,
    IdAddresses,
    IdCalls,
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
# join_multicast() passes a token to the kernel. The event of that call contains the same token.
_tokens = itertools.count(1)

# In these states the addresses of an id can still change.
_CHANGES_ADDRESS = frozenset({states.IDLE, states.ADDR_BOUND, states.ADDR_QUERY})

# These events need more than a change of the state.
_NEEDS_MORE = frozenset({CmEventType.CONNECT_REQUEST, CmEventType.DEVICE_REMOVAL})

# connect() and accept() end in one of these. Before the task runs, the peer might have left, or a
# malformed message might have ended the connection here. In RESPONDED the id has no queue pair,
# and the user moves one.
_CONNECTED = (
    states.CONNECTED,
    states.DISCONNECTING,
    states.DISCONNECTED,
    states.RESPONDED,
)


class BaseCmId(AsyncContextManagerMixin, ABC):
    """A communication identifier with awaitable operations, asynchronous or synchronous.

    Every await can be cancelled. After a cancelled resolve_addr(), resolve_route(), set_path(),
    connect(), resolve_and_connect() or accept(), the id can only be closed. Only one task at a time
    can wait for an id.
    """

    def __init__(self, handle: IdHandle, state: CmState, event: CmEvent | None) -> None:
        self.handle = handle
        self.context: object = None
        """Any object of the user."""
        self.id_state = IdState(state, event)
        """The state, and the events that led to it."""
        self._completions: OwnCompletions | None = None
        self._requests: PendingRequests | None = None
        """The requests of a listening id. None: it has never listened."""
        self._has_listened = state is states.LISTENING
        self._joining: dict[int, CmEvent | None] = {}
        self._device: Device | None = None
        self._addresses = handle.request_addresses
        """The addresses, once they do not change any more."""
        self._is_moved = False

    # --- properties ---

    @property
    def state(self) -> CmState:
        """The state of the id. See `aiordma.cm.states`."""
        return self.id_state.current

    @property
    def event(self) -> CmEvent | None:
        """The last event. It holds the peer's private data until the next event arrives."""
        return self.id_state.event

    @property
    def request(self) -> CmEvent | None:
        """The CONNECT_REQUEST event, if the id is of a request: the peer's private data, the
        numbers of reads and atomics. Later events do not replace it."""
        return self.id_state.request

    @property
    def established(self) -> CmEvent | None:
        """The event that reported the connection. It holds the peer's answer to connect()."""
        return self.id_state.established

    @property
    def loop(self) -> Loop:
        """The event loop that the id belongs to."""
        return self.handle.loop

    @property
    def cm_id(self) -> CmId:
        """The C id. Its `post_*` calls do not block and can be made directly."""
        return self.handle.cm_id

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side; `("", 0)` before the id is bound to an address."""
        return self.addresses.local

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer; `("", 0)` before it is known."""
        return self.addresses.peer

    @property
    def addresses(self) -> IdAddresses:
        """Copies of both addresses, as they are now."""
        if self._addresses is None:
            found = self.handle.cm_id.addresses
            if self.id_state.current in _CHANGES_ADDRESS:
                return found
            self._addresses = found
        return self._addresses

    @property
    def route(self) -> Route:
        """The route to the peer, as far as it is resolved.

        Raises:
            LocalClosed: the id is closed.
        """
        self.id_state.check_open()
        return self.handle.cm_id.route

    def device(self) -> Device:
        """Return the device that the id is bound to.

        Raises:
            ValueError: the id is not bound to a device yet.
            LocalClosed: the id is closed.
        """
        if self._device is None or self.id_state.is_closed:
            self.id_state.check_open()
            self._device = self.handle.cm_id.device()
        return self._device

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before the id is bound to a device."""
        return 0 if self.id_state.is_closed else self.handle.cm_id.port_num

    # --- events and steps ---

    def handle_event(self, event: CmEvent) -> None:
        """Process an rdma_cm event, which can change the state."""
        kind = event.type
        if kind in _NEEDS_MORE:
            if kind is CmEventType.CONNECT_REQUEST:
                self._add_request(event)
            else:
                device_contexts.check_soon()
        elif self._joining and event.context in self._joining:
            self._joining[event.context] = event
        self.id_state.on_event(event)
        if self._completions is not None:
            self._completions.on_event()
        self._notify()

    def _notify(self) -> None:
        """Notify the tasks that wait for a change. Those of a SyncCmId wait in worker threads."""

    @abstractmethod
    async def _perform(self, step: Step, is_done: Callable[[], bool]) -> None:
        """Make the call of `step`, and wait for events until `is_done()`."""

    async def _perform_to(self, step: Step, *expected: CmState, peer: str | None = None) -> None:
        """Make the call of `step`, and wait until the operation has ended.

        Raises:
            RdmaError: the id is then in none of the states `expected`. It names `peer`, or the
                address of the peer.
        """
        await self._perform(step, self._is_idle)
        if self.id_state.current not in expected:
            raise self.id_state.error(peer or self._peer_name(), expected[0])

    def _is_idle(self) -> bool:
        return self.id_state.current not in WAITING

    def _peer_name(self) -> str:
        return format_address(self.peer_address)

    def failure(self, peer: str) -> RdmaError | None:
        """Return the reason why the id, or its last query, failed; None if neither did."""
        return self.id_state.failure(peer)

    # --- options ---

    def set_option(self, option: IdOption, value: int) -> None:
        """Set an option: rdma_set_option(3).

        Raises:
            VerbsError: EINVAL (too late, or not allowed on this kind of id), ENOSYS.
        """
        self.id_state.check_open()
        self.handle.cm_id.set_option(option, value)

    def set_local_ece(self, ece: Ece) -> None:
        """Offer ECE options to the peer, before create_qp(): rdma_set_local_ece(3).

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        self.id_state.check_open()
        self.handle.cm_id.set_local_ece(ece)

    def remote_ece(self) -> Ece:
        """Return the ECE options that the peer offered: rdma_get_remote_ece(3).

        Call it before create_qp().

        Raises:
            VerbsError: EINVAL (the id has a queue pair).
        """
        self.id_state.check_open()
        return self.handle.cm_id.remote_ece()

    # --- resolving ---

    def bind_addr(self, address: SocketAddress) -> None:
        """Bind to a local address; port 0 selects a free one: rdma_bind_addr(3).

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (in use, or not of this machine), EACCES.
        """
        self.id_state.call(states.BIND_ADDR, lambda: self.handle.cm_id.bind_addr(address))

    async def resolve_addr(
        self,
        destination: SocketAddress,
        *,
        source: SocketAddress | None = None,
        timeout: float = RESOLVE_TIMEOUT,
    ) -> None:
        """Resolve `destination` to a device and a link address: rdma_resolve_addr(3).

        Fails after `timeout` seconds. After a failure it can be called again.

        Raises:
            AddressError: no device has a path to it, or no host has the address.
        """
        peer = destination.pair[0]
        step = Step(
            states.RESOLVE_ADDR,
            lambda: self.handle.cm_id.resolve_addr(source, destination, _milliseconds(timeout)),
            None,
            translate=lambda error: _query_error(CmEventType.ADDR_ERROR, error, peer),
        )
        await self._perform_to(step, states.ADDR_RESOLVED, peer=peer)

    async def resolve_route(
        self,
        *,
        timeout: float = RESOLVE_TIMEOUT,
        calls: IdCalls | None = None,
    ) -> None:
        """Resolve the route to the resolved address: rdma_resolve_route(3), in another thread.

        Fails after `timeout` seconds. After a failure it can be called again. The thread makes the
        calls of `calls` before. They can make the queue pair. Only an AsyncCmId has them.

        Raises:
            RouteError: there is no route.
            VerbsError: one of `calls` has failed.
        """
        timeout_ms = _milliseconds(timeout)
        calls = calls or self._new_calls()
        if calls is not None:
            calls.resolve_route(timeout_ms)
        await self._resolve_route(
            lambda: self.handle.cm_id.resolve_route(timeout_ms), blocking_pool, calls
        )

    async def set_path(self, path: bytes) -> None:
        """Set a route that is known already, instead of resolve_route().

        `path` is an array of `struct ibv_path_data`: rdma_set_option(3), RDMA_OPTION_IB_PATH.

        Raises:
            RouteError: it is not accepted (EINVAL: no such path, or neither InfiniBand nor RoCE).
        """
        await self._resolve_route(lambda: self.handle.cm_id.set_option(IbOption.PATH, path), None)

    async def _resolve_route(
        self,
        start: Callable[[], None],
        pool: WorkerPool | None,
        calls: IdCalls | None = None,
    ) -> None:
        step = Step(states.RESOLVE_ROUTE, start, pool, translate=self._route_error, calls=calls)
        await self._perform(step, self._is_idle)
        if self.id_state.current is not states.ROUTE_RESOLVED:
            raise self.id_state.error(self.peer_address[0], states.ROUTE_RESOLVED)

    def _route_error(self, error: VerbsError) -> Exception:
        if error.function in ("rdma_create_qp", "ibv_post_recv", "rdma_connect"):
            return error
        return _query_error(CmEventType.ROUTE_ERROR, error, self.peer_address[0])

    def _new_calls(self) -> IdCalls | None:
        """Return an object for calls of a thread of C; None if a worker thread makes the calls."""
        if self.handle.calls.reader is None or self.id_state.is_closed:
            return None
        return IdCalls(self.handle.cm_id)

    # --- connecting ---

    async def connect(
        self,
        parameters: ConnectionParameters | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Connect along the resolved route: rdma_connect(3).

        On iWARP the call is made in a worker thread, because it can block. If `prepare` is given,
        it is called before, in a worker thread, too. It can make the queue pair and post the first
        receives. Without `parameters`, all of them are the maximum of the device.

        An id without a queue pair stops when the peer has answered. Then move your queue pair with
        the attributes of init_qp_attr(), and call establish(). For a datagram id, `established`
        then contains the destination for sends.

        Raises:
            Rejected: there is no listener at the port, or the application rejected the request.
            Unreachable: the peer did not answer (after about a minute on InfiniBand and RoCE).
            ConnectError: connecting failed for another reason.
            VerbsError: a parameter is over a limit of the device.
        """
        self.id_state.check_allowed(states.CONNECT)
        self.handle.is_slow_to_destroy = iwarp = self.device().is_iwarp
        pool = None if prepare is None else worker_pool
        step = Step(
            states.CONNECT,
            lambda: self.handle.cm_id.connect(parameters),
            blocking_pool if iwarp else pool,
            prepare,
            lambda error: error_for_iwarp_connect(error, self._peer_name()) if iwarp else error,
        )
        await self._perform_to(step, *_CONNECTED)

    async def resolve_and_connect(
        self,
        parameters: ConnectionParameters,
        *,
        timeout: float = RESOLVE_TIMEOUT,
        calls: IdCalls | None = None,
    ) -> None:
        """Resolve the route, and connect along it at once: resolve_route(), then connect().

        For an AsyncCmId on InfiniBand and RoCE, rdma_connect(3) is called where the loop reads the
        event that the route is resolved: no task has to run in between.

        Raises: as resolve_route() and connect().
        """
        self.id_state.check_allowed(states.RESOLVE_AND_CONNECT)
        calls = calls or self._new_calls()
        if calls is None or self.device().is_iwarp:  # there rdma_connect() can block
            await self.resolve_route(timeout=timeout, calls=calls)
            await self.connect(parameters)
            return
        timeout_ms = _milliseconds(timeout)
        calls.resolve_route(timeout_ms)
        calls.connect(parameters)
        step = Step(
            states.RESOLVE_AND_CONNECT,
            lambda: self.handle.cm_id.resolve_route(timeout_ms),
            None,
            translate=self._route_error,
            calls=calls,
        )
        await self._perform_to(step, *_CONNECTED)

    def establish(self) -> None:
        """Confirm the connection of a queue pair that the caller itself moved: rdma_establish(3).

        Raises:
            VerbsError: EINVAL.
            RdmaError: the peer has not answered.
        """
        self.id_state.call(states.ESTABLISH, self.handle.cm_id.establish)

    def notify_established(self) -> None:
        """Notify the CM that data arrived before the peer's confirmation: rdma_notify(3).

        The connection is then established without the confirmation.
        """
        try:
            self.handle.cm_id.notify()
        except VerbsError as error:  # EISCONN: the confirmation was faster
            logger.debug("ignored: %s", error)

    # --- accepting ---

    async def accept(
        self,
        parameters: ConnectionParameters | None = None,
        prepare: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
        calls: IdCalls | None = None,
    ) -> None:
        """Accept the request: rdma_accept(3), in another thread.

        `prepare` is called before, and `finish` after the call, in a worker thread. `prepare` can
        make the queue pair and post the first receives. So can `calls`, see resolve_route().

        Returns after the peer has confirmed; for datagrams, at once. After this call the request
        can no longer be rejected. Without `parameters` (which needs a queue pair), the parameters
        of the peer are used.

        Raises:
            ConnectError: the peer has disconnected, or did not confirm.
            DeviceRemoved: the device was removed.
            VerbsError: the queue pair could not be made, or a receive not posted. The request is
                rejected.
            LocalClosed: the id is closed, or was closed during the wait.
        """
        is_requested = self.id_state.current is states.REQUESTED
        is_datagram = is_requested and self.handle.cm_id.is_datagram
        if is_requested and parameters is not None:
            calls = calls or self._new_calls()
            if calls is not None:
                calls.accept(parameters)
        step = Step(
            states.ACCEPT,
            lambda: self.handle.cm_id.accept(parameters),
            worker_pool,
            None if prepare is None else lambda: self._prepare_answer(prepare),
            self._accept_error,
            finish,
            calls,
        )
        if is_datagram:
            await self._perform(step, lambda: True)
            if self.id_state.current is not states.ACCEPTING:
                raise self.id_state.error(self._peer_name(), states.CONNECTED)
            self.id_state.move(states.CONNECTED)  # datagrams have no ESTABLISHED event here
        else:
            await self._perform_to(step, *_CONNECTED)

    def _prepare_answer(self, prepare: Callable[[], None]) -> None:
        """Call `prepare`. Its failure is the only sign that the peer gave up meanwhile."""
        try:
            prepare()
        except VerbsError as error:
            failure = self._unprepared(error)
            if failure is error:
                raise
            raise failure from error

    def _accept_error(self, error: VerbsError) -> Exception:
        if error.function in ("rdma_create_qp", "ibv_post_recv"):
            return self._unprepared(error)
        return ConnectError(f"{self._peer_name()} could not be accepted: {error}")

    def _unprepared(self, error: VerbsError) -> Exception:
        """Reject the request, for which no queue pair could be made. Return the exception."""
        if self.id_state.is_closed:
            return LocalClosed("closed on this side")
        try:
            self.handle.cm_id.reject()
        except VerbsError:
            failure = translate_removal(error)
            if failure is not error:
                return failure
            return ConnectError(f"{self._peer_name()} gave up before it was accepted")
        return error

    def reject(self, private_data: bytes = b"", *, ece: bool = False) -> None:
        """Reject the request, with private data for the peer: rdma_reject(3).

        Close the id afterwards. With `ece`, the reason is the ECE options that the peer offered:
        rdma_reject_ece(3). It is no error if the peer has disconnected meanwhile.

        Raises:
            ValueError: the private data is longer than 148 bytes, 251 on iWARP, 136 of datagrams.
            LocalClosed: the request was answered already.
        """
        self.id_state.check_allowed(states.REJECT)
        is_datagram = self.handle.cm_id.is_datagram
        limits = DATAGRAM_LIMITS if is_datagram else PrivateDataLimits.of(self.device())
        check_private_data(private_data, limits.reject)
        try:
            self.id_state.call(
                states.REJECT, lambda: self.handle.cm_id.reject(private_data, ece=ece)
            )
        except VerbsError as error:
            logger.debug("the peer has disconnected: %s", error)
            self.id_state.move(states.REFUSED)

    def check_unanswered(self) -> None:
        """Check that this request was neither accepted nor rejected.

        Raises:
            LocalClosed: the request was answered already.
            ConnectError: the peer gave up, or the device was removed. The id is then closed.
        """
        if self.id_state.current is states.REQUESTED:
            return
        peer = self._peer_name()
        failure = self.failure(peer)
        if self.id_state.current not in FINAL or failure is None:
            raise LocalClosed("the request was answered already")
        self.abort()
        if isinstance(failure, ConnectError):
            raise failure
        raise ConnectError(f"the request of {peer} has failed: {failure}") from failure

    # --- listening ---

    def listen(self, backlog: int = 0) -> None:
        """Listen: rdma_listen(3). At most `backlog` requests wait for get_request() (0: 1024).

        The hosts of the peers take turns. When `backlog` requests wait, the host with the most of
        them has its newest one rejected.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (in use), EMFILE (listening needs a descriptor).
            BusyError: a call on the id is under way.
        """
        requests = self._own_requests()  # before a thread that reads events can need it
        self.id_state.call(states.LISTEN, lambda: self._listen(backlog))
        self._has_listened = True
        requests.backlog = backlog if 0 < backlog < MAX_BACKLOG else MAX_BACKLOG

    def _listen(self, backlog: int) -> None:
        self.handle.cm_id.listen(backlog)

    @property
    def requests_waiting(self) -> int:
        """The number of connection requests that no task has taken yet."""
        return 0 if self._requests is None else len(self._requests)

    @property
    def requests_rejected(self) -> int:
        """The number of requests that were rejected because one too many was waiting."""
        return 0 if self._requests is None else self._requests.rejected

    def limit_requests(self, room: Callable[[], int]) -> None:
        """Reject a request if `room()`, the number of further connections, is not above 0."""
        self._own_requests().room = room

    def _own_requests(self) -> PendingRequests:
        if self._requests is None:
            self._requests = PendingRequests()
        return self._requests

    def _add_request(self, event: CmEvent) -> None:
        is_listening = self.id_state.current is states.LISTENING
        self._own_requests().add(self.handle, event, is_listening=is_listening)
        self._drop_requests_if_closed()

    def _check_listening(self) -> None:
        if self.id_state.current is not states.LISTENING:
            raise self.id_state.error("the listener", states.LISTENING)

    def _drop_requests_if_closed(self) -> None:
        """Drop a request that arrived while another thread closed the id."""
        if self.id_state.is_closed and self._requests is not None:
            self._requests.drop_all()

    # --- the queue pair ---

    async def create_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """Make the id's queue pair, in a worker thread: rdma_create_qp(3).

        It is made in `pd`, or in librdmacm's default protection domain. Where `init` has no
        completion queue, librdmacm makes one, which get_send_comp() and get_recv_comp() read. The
        queue pair is destroyed with the id, also if this call is cancelled.

        Raises:
            VerbsError: EINVAL (over a limit of the device, or the id has a queue pair), ENOMEM,
                EOPNOTSUPP.
            DeviceRemoved: the device was removed.
            ValueError: an argument is closed, or the id is not bound to a device yet.
        """
        self.id_state.check_open()
        return await self.handle.call(lambda: self.make_qp(init, pd))

    def make_qp(self, init: QueuePairInit, pd: ProtectionDomain | None = None) -> QueuePair:
        """Make the queue pair as create_qp() does. Blocks: call it in a worker thread.

        The argument `prepare` of connect() and accept() can call it.
        """
        if pd is None:
            self.handle.acquire_context()
        with self.handle.calls.channel_lock:
            return self.handle.cm_id.create_qp(init, pd)

    def init_qp_attr(self, state: QpState) -> QueuePairAttributes:
        """Return the attributes that move a queue pair to `state`: rdma_init_qp_attr(3).

        They are for a queue pair that create_qp() did not make.

        Raises:
            VerbsError: EINVAL (too early in the state of the id).
        """
        self.id_state.check_open()
        return self.handle.cm_id.init_qp_attr(state)

    async def create_srq(
        self,
        caps: SharedReceiveQueueCaps,
        pd: ProtectionDomain | None = None,
        srq_type: SrqType = SrqType.BASIC,
    ) -> SharedReceiveQueue:
        """Make a shared receive queue, which is destroyed with the id: rdma_create_srq(3).

        If it is made before the queue pair, the queue pair uses it, and so does `post_recv` of the
        id. For an XRC queue (rdma_create_srq_ex(3)), the XRC domain is made, too. Other queue pairs
        share the queue if it is given in their QueuePairInit. They must be destroyed first.

        Raises:
            VerbsError: EOPNOTSUPP (type not supported by the device), EINVAL, ENOMEM.
            ValueError: an argument is closed, or the id is not bound to a device yet.
        """
        self.id_state.check_open()

        def create() -> SharedReceiveQueue:
            if pd is None:
                self.handle.acquire_context()
            if srq_type is SrqType.BASIC:
                return self.handle.cm_id.create_srq(pd, caps)
            return self.handle.cm_id.create_srq_ex(pd, caps, srq_type)

        return await self.handle.call(create)

    # --- memory ---

    async def reg_msgs(self, buffer: Buffer) -> Registration:
        """Register memory to send from and receive into: rdma_reg_msgs(3), in a worker thread.

        `cm_id.post_send` and the other `post_*` calls take the registration. Its close()
        deregisters the memory (rdma_dereg_mr(3)); otherwise this is done when the id is destroyed,
        also if this call is cancelled.

        Raises:
            VerbsError: ENOMEM (the locked-memory limit is reached).
            ValueError: the id is not bound to a device yet.
            BufferError: the buffer is not contiguous.
        """
        return await self._register(lambda: self.handle.cm_id.reg_msgs(buffer))

    async def reg_read(self, buffer: Buffer) -> Registration:
        """Register memory that the peer can read: rdma_reg_read(3). Raises: as reg_msgs."""
        return await self._register(lambda: self.handle.cm_id.reg_read(buffer))

    async def reg_write(self, buffer: Buffer) -> Registration:
        """Register memory that the peer can write: rdma_reg_write(3). Raises: as reg_msgs."""
        return await self._register(lambda: self.handle.cm_id.reg_write(buffer))

    async def _register(self, register: Callable[[], Registration]) -> Registration:
        self.id_state.check_open()

        def call() -> Registration:
            self.handle.acquire_context()
            registration = register()
            self.handle.add_destroyed_callback(registration.close)
            return registration

        return await self.handle.call(call)

    # --- completions ---

    async def get_send_comp(self) -> Completion:
        """Wait for the next completion of the id's send queue: rdma_get_send_comp(3).

        Waits in a worker thread. Cancelling loses no completion. A failed request does not raise
        here: see `Completion.check`. When the peer disconnects during the wait, this side
        disconnects too. The device then flushes the posted requests, which ends the wait.

        Raises:
            LocalClosed: the id is closed, or was closed during the wait.
            DeviceRemoved: the device was removed.
            ValueError: the id has no completion queue of its own for sending.
            BusyError: another task is waiting for these completions.
            VerbsError: the queue is broken.
        """
        self.id_state.check_open()
        return await self._own_completions().next_sent(self.handle.cm_id.send_queue(), self)

    async def get_recv_comp(self) -> Completion:
        """Wait for the next completion of the id's receive queue: rdma_get_recv_comp(3).

        Otherwise as get_send_comp().
        """
        self.id_state.check_open()
        return await self._own_completions().next_received(self.handle.cm_id.recv_queue(), self)

    def _own_completions(self) -> OwnCompletions:
        if self._completions is None:
            self._completions = OwnCompletions(self.handle, self.id_state)
        return self._completions

    def event_fds(self) -> list[int]:
        """Return the descriptors of event channels that no loop reads."""
        return []

    def read_events(self) -> None:
        """Read the events that have arrived on these channels. Called in a worker thread."""

    # --- multicast ---

    async def join_multicast(
        self, group: SocketAddress, flags: JoinFlags = JoinFlags.FULLMEMBER
    ) -> CmEvent:
        """Join a group: rdma_join_multicast(3) or, for flags, rdma_join_multicast_ex(3).

        The id must be bound to a device and be for datagrams. Its queue pair, if there is one, then
        receives the datagrams to the group. The returned event contains the destination for sends:
        `ah_attr`, `qp_num`, `qkey`. If this is cancelled, the kernel can still complete the join;
        closing the id leaves the group.

        Raises:
            ConnectError: the group could not be joined.
            VerbsError: EINVAL (wrong state), ENOSYS (iWARP has no multicast), EOPNOTSUPP.
        """
        self.id_state.check_open()
        token = next(_tokens)
        self._joining[token] = None
        step = Step(None, lambda: self._join(group, token, flags), None)
        try:
            await self._perform(
                step, lambda: self._joining[token] is not None or self.id_state.current in FINAL
            )
            event = self._joining[token]
        finally:
            del self._joining[token]
        if event is None:
            raise self.id_state.error(group.host, states.ADDR_BOUND)
        if event.type is not CmEventType.MULTICAST_JOIN or event.status:
            raise error_for_event(event, group.host)
        return event

    def _join(self, group: SocketAddress, token: int, flags: JoinFlags) -> None:
        cm_id = self.handle.cm_id
        # A queue pair that is attached to a group cannot be destroyed, and librdmacm stores a
        # record of each group until it is left. The lambda must not refer to this object.
        self.handle.add_pre_destroy_hook(group, lambda: cm_id.leave_multicast(group))
        cm_id.join_multicast(group, token, flags)

    async def leave_multicast(self, group: SocketAddress) -> None:
        """Leave a group: rdma_leave_multicast(3), in a worker thread.

        Raises:
            VerbsError: EADDRNOTAVAIL (not joined).
        """
        self.id_state.check_open()
        self.handle.remove_pre_destroy_hook(group)

        def leave() -> None:
            with self.handle.calls.channel_lock:
                self.handle.cm_id.leave_multicast(group)

        await self.handle.call(leave)

    # --- the end ---

    async def disconnect(self) -> None:
        """Disconnect, or confirm the peer's disconnect, and wait for the end: rdma_disconnect(3).

        The queue pair moves to its error state, and its posted requests are flushed. If the peer
        does not answer, the wait takes about a minute on InfiniBand and RoCE. Cancelling stops the
        wait only.

        Raises:
            RdmaError: there is no connection, or the id is for datagrams.
        """
        if not self.id_state.is_closed and self.handle.cm_id.is_datagram:
            raise RdmaError("datagrams have no connection to end")
        if self.id_state.current is states.DISCONNECTED:
            self.start_disconnect()
            await checkpoint()
            return
        step = Step(states.DISCONNECT, self._disconnect, worker_pool)
        await self._perform(step, lambda: self.id_state.current is not states.DISCONNECTING)

    def _disconnect(self) -> None:
        try:
            with self.handle.calls.channel_lock:
                self.handle.cm_id.disconnect()
        except VerbsError as error:
            # On iWARP the peer can disconnect first. Its DISCONNECTED event then arrives soon.
            logger.debug("ignored: %s", error)

    def start_disconnect(self) -> None:
        """Disconnect, without waiting for the end. Do nothing if there is no connection.

        The call can block on iWARP, and on a synchronous id. Then another thread makes it.
        """
        state = after_call(self.id_state.current, states.DISCONNECT)
        try:
            if state is None or self.handle.cm_id.is_datagram:
                return
            is_iwarp = self.device().is_iwarp
        except (LocalClosed, ValueError):  # another thread has just abandoned the id
            return
        self.id_state.move(state)
        calls = self._new_calls() if is_iwarp else None
        if calls is not None:
            calls.disconnect()
            self.handle.submit_calls(calls)
        elif is_iwarp or self.handle.calls.reader is None:
            self.handle.submit(self._disconnect)
        else:
            self.handle.run(self._disconnect)

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that no task has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        self.abandon()

    def abandon(self) -> None:
        """Close at once without waking waiters. Callable from any thread. Idempotent."""
        if not self.id_state.is_closed:
            self._leave()
            self.handle.destroy()
        if self._requests is not None:
            self._requests.drop_all()

    def _leave(self) -> None:
        """Stop using the C id, which is destroyed or moved to another object next."""
        self._addresses = self.addresses
        self.id_state.close()

    def _transfer_to(self, successor: BaseCmId) -> None:
        """Move the state and the requests to `successor`, made by migrate() for the same C id."""
        successor.context = self.context
        self.id_state.copy_to(successor.id_state)
        if self._requests is not None:
            self._requests.move_to(successor._own_requests())
        successor._has_listened = self._has_listened
        if self._completions is not None:
            self._completions.move_to(successor.id_state)
            successor._completions, self._completions = self._completions, None
        self._leave()
        self._is_moved = True

    async def aclose(self) -> None:
        """Close the id as abort() does, and wait until everything is destroyed. Idempotent.

        Cancelling stops the wait only.
        """
        self.abort()
        if self._is_moved:
            await checkpoint()
        else:
            await self.handle.wait_destroyed()

    def __del__(self) -> None:
        if not hasattr(self, "_is_moved") or self.id_state.is_closed:
            return
        name = repr(self)
        self.abandon()
        warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id_state.current.name} at {id(self):#x}>"


async def close_after(cm: BaseCmId, error: BaseException) -> None:
    """Close an id because of `error`, which the caller then raises again.

    Wait until everything is destroyed. After a cancellation that is done in the background.

    Raises:
        DeviceRemoved: `error` is a VerbsError that a removed device has caused.
    """
    if not isinstance(error, Exception):
        cm.abort()
        return
    failure: Exception = error
    if isinstance(error, VerbsError) and cm.port_num:
        failure = translate_removal(error)
    await cm.aclose()
    if failure is not error:
        raise failure from error


def _query_error(kind: CmEventType, error: VerbsError, peer: str) -> Exception:
    """Return the exception for a query that failed at once: the same as for its error event."""
    failure = error_for_event(CmEvent(kind, 0, status=-(error.errno or 1)), peer)
    failure.__cause__ = error
    return failure


def _milliseconds(seconds: float) -> int:
    # rdma_resolve_route() rejects 0. No min() and max(): see states.py.
    milliseconds = round(seconds * 1000)
    if milliseconds < 1:
        return 1
    return milliseconds if milliseconds < 2**31 else 2**31 - 1
