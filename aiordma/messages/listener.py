"""Listener: the requests of peers who want to connect; ConnectRequest: one of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.cm.accepting import BaseListener, BaseRequest
from aiordma.errors import (
    RdmaError,
    VerbsError,
)
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.messages.connection import Connection, message_endpoint
from aiordma.options import (
    DEFAULT_OPTIONS,
    ConnectionOptions,
    PrivateDataLimits,
    check_private_data,
)
from aiordma.qp import SharedReceives
from aiordma.verbs import Device

logger = logging.getLogger(__name__)


class SharedReceivesByDevice:
    """The receive buffers that a listener's connections share, one set for each device."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._depth = options.shared_recv_depth
        self._slot_size = options.max_message_size
        self._receives: dict[Device, SharedReceives] = {}
        self._closed = False

    def receives(self, cm: AsyncCmId, options: ConnectionOptions) -> SharedReceives | None:
        """What a connection with these options takes from; None if it has buffers of its own.

        Raises:
            ValueError: the options ask for larger messages than the listener's.
        """
        if not options.shared_recv_depth or self._closed:
            return None
        if options.max_message_size > self._slot_size or not self._depth:
            raise ValueError(
                f"the listener shares {self._depth} receive buffers of {self._slot_size} bytes: "
                "shared_recv_depth and max_message_size are for listen() to set"
            )
        device = cm.device()
        receives = self._receives.get(device)
        if receives is None:
            receives = SharedReceives(cm.loop, device, self._depth, self._slot_size)
            self._receives[device] = receives
        return receives

    def close(self) -> None:
        """The connections that there are keep what they share. Idempotent."""
        self._closed = True
        while self._receives:
            self._receives.popitem()[1].release()


class ConnectRequest(BaseRequest):
    """A peer that wants to connect: accept it or reject it.

    One that is just dropped is rejected, with a ResourceWarning.
    """

    def __init__(
        self, cm: AsyncCmId, options: ConnectionOptions, sharing: SharedReceivesByDevice
    ) -> None:
        """For Listener; not to be called by others."""
        super().__init__(cm)
        self._options = options
        self._shared_receives = sharing
        self._private_data = cm.event.private_data if cm.event is not None else b""

    @property
    def private_data(self) -> bytes:
        """What the peer sent along; InfiniBand and RoCE pad it with zeros to 56 bytes."""
        return self._private_data

    def accept(
        self, private_data: bytes = b"", options: ConnectionOptions | None = None
    ) -> AwaitableContextManager[Connection]:
        """Accept: `await request.accept()`, or `async with request.accept() as connection`.

        `private_data` reaches the peer with the answer: up to 196 bytes on InfiniBand and RoCE
        (padded with zeros to that), 251 on iWARP. `options` default to the listener's.

        Cancelling ends the connection; nothing is left behind. See rdma_accept(3).

        Raises:
            ConnectError: the peer gave up, or did not confirm.
            DeviceRemoved: the device went away.
            LocalClosed: the request was answered already.
            VerbsError: not enough locked memory, for one; the peer is rejected.
            ValueError: the private data is too long, or the options are more than the device can
                do; the request can still be answered.
        """
        return AwaitableContextManager(self._accept(private_data, options or self._options))

    async def _accept(self, private_data: bytes, options: ConnectionOptions) -> Connection:
        self._cm.check_unanswered()
        device = self._cm.device()
        check_private_data(private_data, PrivateDataLimits.of(device).accept)
        options.check_device(device)
        receives = self._shared_receives.receives(self._cm, options)
        try:
            endpoint = message_endpoint(self._cm, options, receives)
            await endpoint.accept(private_data)
        except BaseException:
            self._cm.abort()
            raise
        return Connection(endpoint)

    async def reject(self, private_data: bytes = b"") -> None:
        """Refuse the peer, who gets Rejected with `private_data` (148 bytes; 251 on iWARP).

        A peer that gave up already is no error. See rdma_reject(3).

        Cancelling does not take the refusal back.

        Raises:
            LocalClosed: the request was answered already.
            ValueError: the private data is too long; the request can still be answered.
        """
        await self._reject(private_data)


class Listener(BaseListener[ConnectRequest, Connection]):
    """Connection requests, one after another: `async for request in listener`.

    From `listen()`. Closing it rejects the requests that nobody has taken, and leaves the
    connections that were accepted alone.
    """

    def __init__(self, cms: list[AsyncCmId], options: ConnectionOptions) -> None:
        """For listen(); not to be called by others. All `cms` listen on the same port."""
        sharing = SharedReceivesByDevice(options)
        super().__init__(cms, lambda cm: ConnectRequest(cm, options, sharing))
        self._shared_receives = sharing

    @classmethod
    def from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        *,
        backlog: int = 0,
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> AwaitableContextManager[Listener]:
        """Make one from an id: `await Listener.from_id(cm)`, or `async with`.

        The id is bound to an address, as SyncCmId.create_ep makes a passive one, or listens
        already. A synchronous one moves to the running loop first. What create_ep() was told of
        queue pairs is not used. The id is the listener's from now on, and is closed if this fails.

        Raises:
            RdmaError: the id is in another state; it is left as it is.
            VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is taken.
        """
        return AwaitableContextManager(cls._from_id(cm, backlog, options))

    @classmethod
    async def _from_id(
        cls, cm: AsyncCmId | SyncCmId, backlog: int, options: ConnectionOptions
    ) -> Listener:
        if cm.state not in (CmState.ADDR_BOUND, CmState.LISTENING):
            raise RdmaError(f"an id in state {cm.state.name} cannot listen: it must be bound")
        own = await cm.migrate() if isinstance(cm, SyncCmId) else cm
        if own.state is CmState.ADDR_BOUND:
            try:
                own.listen(backlog)
            except VerbsError:
                await own.aclose()
                raise
        return cls([own], options)

    async def accept(self, private_data: bytes = b"") -> Connection:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway is passed over. Cancelling may lose the one peer that was just
        being accepted. Raises: as get_request(), and VerbsError as ConnectRequest.accept.
        """
        return await self._accept_next(lambda request: request.accept(private_data))

    async def serve(self, handler: Callable[[Connection], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own.

        The connection is closed when its handler returns. An exception that a handler raises is
        logged, and ends that connection only; that a peer went away is no more than an INFO.
        Returns when the listener is closed, after the last handler has returned.

        Cancelling closes the listener and cancels every handler.

        Raises: as get_request(), except for LocalClosed.
        """
        await self._serve(ConnectRequest.accept, handler)

    def abort(self) -> None:
        """Stop listening, without waiting. Idempotent."""
        super().abort()
        self._shared_receives.close()
