"""Listener: waits for peers that want to connect. ConnectRequest: the request of one peer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from aiordma.cm import AsyncCmId, CmState, SyncCmId, close_after
from aiordma.cm.accepting import BaseListener, BaseRequest
from aiordma.errors import (
    RdmaError,
    VerbsError,
)
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.messages.connection import Connection, message_endpoint
from aiordma.options import (
    DEFAULT_LIMITS,
    DEFAULT_OPTIONS,
    ConnectionOptions,
    ListenerLimits,
    PrivateDataLimits,
    check_private_data,
)
from aiordma.qp import SharedReceives
from aiordma.verbs import Device

logger = logging.getLogger(__name__)


class SharedReceivesByDevice:
    """The receive buffers that the connections of a listener share, for each device."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._depth = options.shared_recv_depth
        self._slot_size = options.max_message_size
        self._receives: dict[Device, SharedReceives] = {}
        self._closed = False

    def receives(self, cm: AsyncCmId, options: ConnectionOptions) -> SharedReceives | None:
        """Return the shared buffers for a connection with these options; None if it shares none.

        Raises:
            ValueError: the options ask for sharing or for larger messages, and those of the
                listener do not.
        """
        if not options.shared_recv_depth or self._closed:
            return None
        if options.max_message_size > self._slot_size or not self._depth:
            raise ValueError(
                f"the listener shares {self._depth} receive buffers of {self._slot_size} bytes; "
                "shared_recv_depth and a larger max_message_size are for listen() to set"
            )
        device = cm.device()
        receives = self._receives.get(device)
        if receives is None:
            receives = SharedReceives(
                cm.loop,
                device,
                self._depth,
                self._slot_size,
                partial(_drop, self._receives, device),
            )
            self._receives[device] = receives
        return receives

    def close(self) -> None:
        """Drop the listener's references. Existing connections keep the buffers. Idempotent."""
        self._closed = True
        while self._receives:
            self._receives.popitem()[1].release()

    def __del__(self) -> None:
        for receives in self._receives.values():  # the listener was not closed
            receives.release_threadsafe()


def _drop(found: dict[Device, SharedReceives], device: Device, failed: SharedReceives) -> None:
    """Drop the buffers of a device that failed or was removed. The next connection makes new ones.

    A removed device waits until all that uses it is released.
    """
    if found.get(device) is failed:
        del found[device]
        failed.release()


class ConnectRequest(BaseRequest):
    """The request of a peer that wants to connect: accept it or reject it.

    `Listener.get_request()` and `async for` over a listener return one. A request that is
    garbage-collected without an answer is rejected, with a ResourceWarning.
    """

    def __init__(
        self,
        cm: AsyncCmId,
        options: ConnectionOptions,
        limits: ListenerLimits,
        shared_receives: SharedReceivesByDevice,
    ) -> None:
        """Called by Listener; not for users."""
        super().__init__(cm, limits.handshake_timeout)
        self._options = options
        self._shared_receives = shared_receives
        self._private_data = cm.request.private_data if cm.request is not None else b""

    @property
    def private_data(self) -> bytes:
        """The private data of the request. InfiniBand and RoCE pad it with zeros to 56 bytes."""
        return self._private_data

    def accept(
        self, private_data: bytes = b"", options: ConnectionOptions | None = None
    ) -> AwaitableContextManager[Connection]:
        """Accept: `await request.accept()` or `async with request.accept() as connection`.

        See rdma_accept(3).

        Cancelling ends the connection, and the peer is notified. Nothing is left behind.

        Args:
            private_data: Bytes that the peer gets with the accept: up to 196 bytes on InfiniBand
                and RoCE, which pad them with zeros to 196, and up to 251 bytes on iWARP.
            options: The options of the connection. None: those of the listener.

        Raises:
            ConnectError: the peer gave up, or did not confirm within `handshake_timeout`.
            DeviceRemoved: the RDMA device was removed.
            LocalClosed: the request was answered already.
            VerbsError: a call failed, for example because the locked-memory limit is too low. The
                peer is rejected.
            ValueError: the private data is too long, or the device or the listener does not allow
                the options. The request can still be answered.
        """
        return AwaitableContextManager(self._accept(private_data, options or self._options))

    async def _accept(self, private_data: bytes, options: ConnectionOptions) -> Connection:
        self._cm.check_unanswered()
        try:
            device = self._cm.device()
            check_private_data(private_data, PrivateDataLimits.of(device).accept)
            receives = self._shared_receives.receives(self._cm, options)
            endpoint = message_endpoint(self._cm, options, receives)
        except ValueError:
            raise
        except BaseException as error:
            await close_after(self._cm, error)
            raise
        async with self._handshake():
            await endpoint.accept(private_data)
        return Connection(endpoint)

    async def reject(self, private_data: bytes = b"") -> None:
        """Reject the request: the peer's connect() raises Rejected with `private_data`.

        The private data can have 148 bytes, 251 on iWARP. It is not an error if the peer gave up
        already. See rdma_reject(3).

        Cancelling does not revoke the rejection.

        Raises:
            LocalClosed: the request was answered already.
            ValueError: the private data is too long. The request can still be answered.
        """
        await self._reject(private_data)


class Listener(BaseListener[ConnectRequest, Connection]):
    """Waits for peers that want to connect.

    `listen()` returns one. There are three ways to use it: `serve()` runs a handler for each peer;
    `accept()` returns the connection to the next peer; `get_request()` and
    `async for request in listener` return the requests, to be accepted or rejected. Only one task
    can wait for requests at a time.

    Close it with `aclose()`, or use it in an `async with` block, which closes it at its end.
    Closing rejects the requests that were not taken. Accepted connections stay open.
    """

    def __init__(
        self, cms: list[AsyncCmId], options: ConnectionOptions, limits: ListenerLimits
    ) -> None:
        """Called by listen(); not for users. All `cms` listen on the same port."""
        shared_receives = SharedReceivesByDevice(options)
        super().__init__(
            cms,
            limits,
            lambda cm: ConnectRequest(cm, options, limits, shared_receives),
            lambda request: request._accept(b"", options),
        )
        self._shared_receives = shared_receives

    @classmethod
    def from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        *,
        backlog: int = 0,
        limits: ListenerLimits = DEFAULT_LIMITS,
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> AwaitableContextManager[Listener]:
        """Make a listener of an id: `await Listener.from_id(cm)` or `async with`.

        The id must be bound to an address or listen already; `SyncCmId.create_ep()` returns such
        ids for the passive side. A SyncCmId is first moved to the running loop. The attributes of
        queue pairs that create_ep() was given are not used.

        The listener owns the id from now on. The id is closed if this fails or is cancelled. Only a
        SyncCmId that was not moved to the loop yet stays as it was.

        Raises:
            RdmaError: the id is in another state. It is left unchanged.
            VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is in use.
        """
        return AwaitableContextManager(cls._from_id(cm, backlog, limits, options))

    @classmethod
    async def _from_id(
        cls,
        cm: AsyncCmId | SyncCmId,
        backlog: int,
        limits: ListenerLimits,
        options: ConnectionOptions,
    ) -> Listener:
        if cm.state not in (CmState.ADDR_BOUND, CmState.LISTENING):
            raise RdmaError(f"an id in state {cm.state.name} cannot listen: it must be bound")
        async_cm = await cm.migrate() if isinstance(cm, SyncCmId) else cm
        if async_cm.state is CmState.ADDR_BOUND:
            try:
                async_cm.listen(backlog)
            except VerbsError:
                await async_cm.aclose()
                raise
        return cls([async_cm], options, limits)

    async def accept(self, private_data: bytes = b"") -> Connection:
        """Wait for the next connection, and return it.

        Peers are accepted as they arrive, up to `max_handshakes` of ListenerLimits at a time. So a
        peer that does not confirm delays no other. A peer that gives up before its connection is
        established is skipped. A connection that is established before a task calls accept() is
        returned by the next call. It got the private data of the call that was waiting when the
        request arrived.

        Cancelling loses no connection.

        Raises:
            VerbsError: as ConnectRequest.accept().
            Others: as get_request().
        """
        return await self._accept_next(lambda request: request.accept(private_data))

    async def serve(self, handler: Callable[[Connection], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(connection)` for each peer in a separate task.

        The connection is closed when its handler returns. An exception in a handler is logged, and
        ends only that connection. If the peer has ended the connection, that is logged at level
        INFO, at most once in 10 seconds, also if a task group of the handler raises it. If a peer
        cannot be accepted, for example because memory is short, an error is logged, at most once in
        10 seconds. serve() returns when the listener is closed and the last handler
        has returned.

        Cancelling closes the listener and cancels every handler.

        Raises: as get_request(), except LocalClosed.
        """
        await self._serve(handler)

    def abort(self) -> None:
        """Stop listening, without waiting. Idempotent."""
        super().abort()
        self._shared_receives.close()
