"""AsyncCmId: an rdma_cm id on the running loop's event channel, its operations awaited."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from aiordma.cm.failures import error_for_event, error_for_iwarp_connect
from aiordma.cm.lifecycle import CmLifecycle
from aiordma.cm.states import FINAL, CmCall, CmState, after_call
from aiordma.dispatch import CmDispatcher
from aiordma.enums import CmEventType, IdOption, PortSpace
from aiordma.errors import BusyError, ConnectError, LocalClosed, VerbsError
from aiordma.loop import Loop, running_loop
from aiordma.rdmacm import CmEvent, CmId, ConnectionParameters, SocketAddress
from aiordma.rdmacm.address import format_address
from aiordma.verbs import CompletionQueue, Device, ProtectionDomain, QueuePair, QueuePairCaps

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT = 5.0
# What rdma_listen() makes of a backlog of 0, unless the administrator changed it.
MAX_BACKLOG = 1024

# A peer may be done, and have disconnected, before this side's task has run again.
_WAS_CONNECTED = (CmState.CONNECTED, CmState.DISCONNECTED)


class AsyncCmId(CmLifecycle):
    """A communication identifier whose events come through the running loop.

    Make one with `await AsyncCmId.create()`; a listening one yields others from get_request().
    Every await may be cancelled: the id then stands in the middle of what was asked, and is only
    good to be closed. One task at a time may wait for an id.
    """

    def __init__(
        self, loop: Loop, dispatcher: CmDispatcher, cm_id: CmId, request: CmEvent | None = None
    ) -> None:
        """For create() and for requests; not to be called by others."""
        state = CmState.IDLE if request is None else CmState.REQUESTED
        super().__init__(loop, dispatcher, cm_id, state, request)
        self._requests: deque[AsyncCmId] = deque()
        self._backlog = MAX_BACKLOG
        self._last_addresses = (("", 0), ("", 0))

    @classmethod
    async def create(cls, port_space: PortSpace = PortSpace.TCP) -> AsyncCmId:
        """Make an id on the running loop's event channel: rdma_create_id(3).

        Cancelling leaves nothing behind.

        Raises:
            VerbsError: ENODEV when there is no RDMA device, ENOMEM.
        """
        loop = running_loop()
        dispatcher = await CmDispatcher.of(loop)
        return cls(loop, dispatcher, dispatcher.create_id(port_space))

    # --- what it is ---

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side; `("", 0)` before there is one."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[0]
        return _pair(self.cm_id.local_address)

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the other side; `("", 0)` before there is one."""
        if self.state is CmState.CLOSED:
            return self._last_addresses[1]
        return _pair(self.cm_id.peer_address)

    def device(self) -> Device:
        """The device that the id is bound to.

        Raises:
            ValueError: it is bound to none yet.
            LocalClosed: it is closed.
        """
        self._check_open()
        return self.cm_id.device()

    # --- finding the way ---

    def set_option(self, option: IdOption, value: int) -> None:
        """Set an option: rdma_set_option(3).

        Raises:
            VerbsError: EINVAL (too late for it, or not on this kind of id), ENOSYS.
        """
        self._check_open()
        self.cm_id.set_option(option, value)

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
        try:
            self._call_now(
                CmCall.RESOLVE_ADDR,
                lambda: self.cm_id.resolve_addr(source, destination, _milliseconds(timeout)),
            )
        except VerbsError as error:
            event = CmEvent(CmEventType.ADDR_ERROR, 0, status=-(error.errno or 1))
            raise error_for_event(event, destination.pair[0]) from error
        await self._wait_for(destination.pair[0], CmState.ADDR_RESOLVED)

    async def resolve_route(self, *, timeout: float = RESOLVE_TIMEOUT) -> None:
        """Find the route to the resolved address: rdma_resolve_route(3), in a worker thread.

        Gives up after `timeout` seconds; may then be tried again.

        Raises:
            RouteError: there is none.
        """
        peer = self.peer_address[0]
        try:
            await self._call_in_worker(
                CmCall.RESOLVE_ROUTE,
                lambda: self.cm_id.resolve_route(_milliseconds(timeout)),
                parked=True,
            )
        except VerbsError as error:
            event = CmEvent(CmEventType.ROUTE_ERROR, 0, status=-(error.errno or 1))
            raise error_for_event(event, peer) from error
        await self._wait_for(peer, CmState.ROUTE_RESOLVED)

    # --- connecting ---

    def make_qp(
        self,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        caps: QueuePairCaps,
    ) -> QueuePair:
        """Make the id's queue pair, which is destroyed with it: rdma_create_qp(3).

        Blocks, so call it in a worker thread, through `handle.call` or inside connect()'s prepare.

        Raises:
            VerbsError: EINVAL (more than the device can), ENOMEM.
        """
        self.handle.qp = self.cm_id.create_qp(pd, send_cq, recv_cq, caps)
        return self.handle.qp

    async def connect(
        self, parameters: ConnectionParameters, prepare: Callable[[], None] | None = None
    ) -> None:
        """Connect along the resolved route: rdma_connect(3), in a worker thread.

        `prepare` is called first, in the same thread: the place to make the queue pair and to post
        the first receives.

        Raises:
            Rejected: nobody listens there, or the application refused.
            Unreachable: nobody answered (after about a minute on InfiniBand and RoCE).
            ConnectError: it failed otherwise.
            VerbsError: a parameter is over a limit of the device.
        """
        self._allowed(CmCall.CONNECT)
        peer = format_address(self.peer_address)
        self.handle.slow = iwarp = self.device().is_iwarp

        def connect() -> None:
            if prepare is not None:
                prepare()
            try:
                self.cm_id.connect(parameters)
            except VerbsError as error:
                raise (error_for_iwarp_connect(error, peer) if iwarp else error) from None

        await self._call_in_worker(CmCall.CONNECT, connect, parked=iwarp)
        await self._wait_for(peer, *_WAS_CONNECTED)

    # --- being connected to ---

    def listen(self, backlog: int = 0) -> None:
        """Listen: rdma_listen(3). At most `backlog` requests wait unread (0: 1024).

        Requests that come when so many wait are rejected.

        Raises:
            VerbsError: EADDRINUSE or EADDRNOTAVAIL (taken).
        """
        self._call_now(CmCall.LISTEN, lambda: self.cm_id.listen(backlog))
        self._backlog = backlog if 0 < backlog < MAX_BACKLOG else MAX_BACKLOG

    async def get_request(self) -> AsyncCmId:
        """Wait for a connection request: an id in state REQUESTED, to be accepted or rejected.

        Cancelling loses none. See rdma_get_request(3), the synchronous counterpart.

        Raises:
            LocalClosed: the id is closed, or was while waiting.
            BusyError: another task waits for requests.
        """
        if len(self._changed):
            raise BusyError("another task is waiting for requests here")
        while (request := self.take_request()) is None:
            await self._changed.wait()
        return request

    def take_request(self) -> AsyncCmId | None:
        """A connection request that has come already, or None. See get_request().

        Raises:
            LocalClosed: the id is closed.
        """
        if self._requests:
            return self._requests.popleft()
        if self.state is not CmState.LISTENING:
            raise self._error("the listener", CmState.LISTENING)
        return None

    async def accept(
        self, parameters: ConnectionParameters, prepare: Callable[[], None] | None = None
    ) -> None:
        """Accept the request: rdma_accept(3), in a worker thread. `prepare`: see connect().

        Returns when the peer has confirmed. Once begun the request cannot be rejected any more.

        Raises:
            ConnectError: the peer is gone, or did not confirm.
        """
        peer = format_address(self.peer_address)

        def accept() -> None:
            if prepare is not None:
                self._prepare_answer(prepare, peer)
            try:
                self.cm_id.accept(parameters)
            except VerbsError as error:
                raise ConnectError(f"{peer} could not be accepted: {error}") from error

        await self._call_in_worker(CmCall.ACCEPT, accept)
        await self._wait_for(peer, *_WAS_CONNECTED)

    def _prepare_answer(self, prepare: Callable[[], None], peer: str) -> None:
        """Prepare to accept. Of a peer that gave up meanwhile, nothing tells but that it fails."""
        try:
            prepare()
        except VerbsError as error:
            try:
                self.cm_id.reject(b"")
            except VerbsError:
                raise ConnectError(f"{peer} gave up before it was accepted") from error
            raise

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the request, telling the peer why: rdma_reject(3). The id remains to be closed.

        A peer that went away meanwhile is no error.

        Raises:
            LocalClosed: it was answered already.
        """
        try:
            self._call_now(CmCall.REJECT, lambda: self.cm_id.reject(private_data))
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

    def notify_established(self) -> None:
        """Data has come before the peer's confirmation: rdma_notify(3). Then it need not come."""
        try:
            self.cm_id.notify_established()
        except VerbsError as error:  # EISCONN: the confirmation was faster
            logger.debug("ignored: %s", error)

    # --- the end ---

    def start_disconnect(self) -> None:
        """Disconnect in the background, or confirm that the peer did: rdma_disconnect(3).

        The queue pair goes to its error state, and what is posted on it is flushed.
        """
        state = after_call(self.state, CmCall.DISCONNECT)
        if state is not None:
            self.state = state
            self.handle.submit(self.cm_id.disconnect)

    def abort(self) -> None:
        """Close at once: waiters get LocalClosed, everything is destroyed in the background.

        Requests that nobody has taken are rejected. Idempotent. See rdma_destroy_id(3).
        """
        super().abort()
        while self._requests:
            self._requests.popleft().abort()

    def abandon(self) -> None:
        """abort() without telling anyone who waits; callable from any thread."""
        # The C id is about to be freed: this is the last time that it can be asked.
        self._last_addresses = self.local_address, self.peer_address
        super().abandon()

    def _check_open(self) -> None:
        if self.state is CmState.CLOSED:
            raise LocalClosed("the id is closed")

    def handle_event(self, event: CmEvent) -> None:
        """Take an event from the dispatcher."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._handle_request(event)
        super().handle_event(event)

    def _handle_request(self, event: CmEvent) -> None:
        child = AsyncCmId(self.loop, self._dispatcher, CmId.from_address(event.id), event)
        if self.state is CmState.LISTENING and len(self._requests) < self._backlog:
            self._requests.append(child)
        else:
            logger.warning(
                "a connection request was rejected: %d wait already", len(self._requests)
            )
            child.abort()


def _milliseconds(seconds: float) -> int:
    # rdma_resolve_route() refuses 0.
    return max(1, min(round(seconds * 1000), 2**31 - 1))


def _pair(address: SocketAddress | None) -> tuple[str, int]:
    return address.pair if address is not None else ("", 0)
