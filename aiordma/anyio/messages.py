"""Messages for anyio: a connection as an object stream, and its listener."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ObjectStream

import aiordma
from aiordma.anyio.attributes import Attributes, connection_attributes
from aiordma.anyio.listener_base import BaseListener
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.errors import PeerClosed, RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.messages.connection import Connection
from aiordma.messages.listener import Listener
from aiordma.options import DEFAULT_LIMITS, DEFAULT_OPTIONS, ConnectionOptions, ListenerLimits

if TYPE_CHECKING:
    from aiordma.qp.scatter_gather import Source

RECEIVING = "receiving from"
SENDING = "sending to"
NO_HALF_CLOSE = (
    "RDMA closes both directions of a connection at once: send a message that the peer understands "
    "as the last one, and call aclose() when its answer has been received"
)


class RdmaConnection(AbortingContextManagerMixin, ObjectStream[bytes]):
    """A reliable connection that carries whole messages, in order: an object stream of bytes.

    It is made by `aiordma.anyio.connect()` or a RdmaListener. `aclose()`, or the end of its
    `async with` block, closes it. A block that is cancelled closes it by force.

    One task may receive at a time. Any number of tasks may send. Every await is a checkpoint.
    """

    def __init__(self, connection: Connection) -> None:
        """Wrap `connection`, which belongs to the running loop, and own it from now on."""
        self._connection = connection
        self._receiving = ResourceGuard(RECEIVING)
        self._checkpoint = adapter_checkpoint()

    async def receive(self) -> bytes:
        """Wait for the next message and return it; b"" is a message too.

        Messages that arrived before the peer disconnected are returned first. `async for` receives
        until EndOfStream.

        Cancelling loses no message.

        Raises:
            EndOfStream: the peer has disconnected, or its process ended.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the connection failed; `__cause__` is the reason, for example
                DeviceRemoved, WorkRequestError or ReceiveOverrun.
            BusyResourceError: another task is receiving.
        """
        with self._receiving:
            await self._checkpoint()
            try:
                return await self._connection.recv()
            except PeerClosed as error:
                raise EndOfStream(str(error)) from error
            except RdmaError as error:
                raise_as_anyio(error, RECEIVING, is_over=self._connection.closed)

    async def send(self, item: Source) -> None:
        """Send one message: bytes, or any other object that Connection.send() takes.

        Bytes are copied: send() returns when the message is posted. Posting can wait until the peer
        has received earlier messages. A later failure raises from the next call.

        Cancelling before the message is posted sends nothing; the connection goes on.

        Raises:
            ValueError: the message is larger than max_message_size. The connection goes on.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the peer has disconnected, or the connection failed; `__cause__` is
                the reason, for example PeerClosed, DeviceRemoved or WorkRequestError.
            VerbsError: ENOMEM when no more memory can be registered. The connection goes on.
        """
        await self._checkpoint()
        try:
            await self._connection.send(item)
        except RdmaError as error:
            raise_as_anyio(error, SENDING, is_over=self._connection.closed)

    async def send_eof(self) -> None:
        """Raise NotImplementedError: both directions of a connection end together.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_HALF_CLOSE)

    async def aclose(self) -> None:
        """Close gracefully: the messages sent before reach the peer, then both sides disconnect.

        After `close_timeout` seconds the connection is closed by force. Tasks that receive or send
        get ClosedResourceError. Idempotent.

        Cancelling closes the connection by force, as anyio.aclose_forcefully() does.
        """
        await self._connection.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Close the connection by force, without waiting. Idempotent."""
        self._connection.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """The attributes for `extra()`.

        They are those of RdmaAttribute except `message_stream` and `stream`, and the family,
        addresses and ports of SocketAttribute.
        """
        return connection_attributes(self._connection)

    def __repr__(self) -> str:
        return f"<RdmaConnection of {self._connection!r}>"


class RdmaListener(BaseListener[Connection, RdmaConnection]):
    """A listener for connections. It is made by `aiordma.anyio.listen()`.

    Closing it rejects the peers that were not accepted yet. The connections that were accepted
    stay open. Every await is a checkpoint.
    """

    def __init__(self, listener: Listener) -> None:
        """Wrap `listener`, which belongs to the running loop, and own it from now on."""
        super().__init__(listener, RdmaConnection)
        self._accept_next = listener.accept

    async def accept(self, private_data: bytes = b"") -> RdmaConnection:
        """Wait for a peer that connects, and accept it.

        `private_data` is sent to the peer with the answer; see ConnectRequest.accept(). A peer that
        gives up halfway is skipped. A peer that does not confirm delays no other. Cancelling loses
        no peer.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device that the listener was bound to was removed; `__cause__`
                is the reason.
            BusyResourceError: another task is waiting for peers.
            VerbsError: one peer could not be accepted, for example because memory was short. The
                listener stays open.
        """
        return await self._accept(partial(self._accept_next, private_data))


def connect(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaConnection]:
    """Connect to a listening peer: `await connect(...)` or `async with connect(...) as stream`.

    The arguments, the exceptions and the effect of cancelling are those of aiordma.connect(). A
    ConnectError is an OSError, as anyio programs expect.
    """

    async def connecting() -> RdmaConnection:
        connection = await aiordma.connect(
            host, port, local_address=local_address, private_data=private_data, options=options
        )
        return RdmaConnection(connection)

    return AwaitableContextManager(connecting())


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaListener]:
    """Listen for peers: `await listen(...)` or `async with listen(...) as listener`.

    The arguments, the exceptions and the effect of cancelling are those of aiordma.listen().
    """

    async def listening() -> RdmaListener:
        listener = await aiordma.listen(host, port, backlog=backlog, limits=limits, options=options)
        return RdmaListener(listener)

    return AwaitableContextManager(listening())
