"""MessageStream: a connection as an object stream of anyio's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ObjectStream

from aiordma.anyio.attributes import Attributes, of_connection
from aiordma.anyio.checkpoints import owed_checkpoint
from aiordma.anyio.errors import raise_as_anyio
from aiordma.errors import PeerClosed, RdmaError
from aiordma.loop.context_managers import AbortableBlock
from aiordma.messages.connection import Connection

if TYPE_CHECKING:
    from aiordma.qp.scatter_gather import Source

RECEIVING = "receiving from"
SENDING = "sending to"
NO_HALF_CLOSE = (
    "RDMA closes both directions of a connection at once: send a message that the peer understands "
    "as the last one, and aclose() when its answer has come"
)


class MessageStream(AbortableBlock, ObjectStream[bytes]):
    """A reliable connection that carries whole messages, in order: an object stream of bytes.

    From `aiordma.anyio.connect()` or a MessageListener. It is closed by `aclose()`, or by leaving
    an `async with` block of it; a block that is cancelled closes it by force.

    One task may receive at a time; any number may send. Every await is a checkpoint.
    """

    def __init__(self, connection: Connection) -> None:
        """Present a connection of this loop's as a stream, which owns it from now on."""
        self._connection = connection
        self._receiving = ResourceGuard(RECEIVING)
        self._checkpoint = owed_checkpoint()

    async def receive(self) -> bytes:
        """Wait for the next message and return it; b"" is a message too.

        Messages that came before the peer disconnected are returned first. `async for` receives
        until EndOfStream.

        Cancelling loses no message.

        Raises:
            EndOfStream: the peer has disconnected, or its process ended.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the connection failed; its `__cause__` tells how, as DeviceRemoved,
                WorkRequestError or ReceiveOverrun.
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
        """Send one message: bytes, or whatever else Connection.send() takes.

        Bytes are copied: this returns when the message is posted, which may wait for the peer to
        receive what came before, and a later failure raises from the next call.

        Cancelling before it is posted sends nothing; the connection goes on.

        Raises:
            ValueError: the message is larger than max_message_size. The connection goes on.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the peer has disconnected, or the connection failed; its
                `__cause__` tells how, as PeerClosed, DeviceRemoved or WorkRequestError.
            VerbsError: ENOMEM when no more memory can be registered. The connection goes on.
        """
        await self._checkpoint()
        try:
            await self._connection.send(item)
        except RdmaError as error:
            raise_as_anyio(error, SENDING, is_over=self._connection.closed)

    async def send_eof(self) -> None:
        """There is no such thing: a connection's directions end together.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_HALF_CLOSE)

    async def aclose(self) -> None:
        """Close gracefully: what was sent reaches the peer, then both sides disconnect.

        Takes at most `close_timeout` seconds until what is left is ended by force. Tasks that
        receive or send get ClosedResourceError. Idempotent.

        Cancelling closes it by force, as anyio.aclose_forcefully() does.
        """
        await self._connection.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Close it by force, without waiting. Idempotent."""
        self._connection.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """RdmaAttribute's, and of SocketAttribute's family, addresses and ports."""
        return of_connection(self._connection)

    def __repr__(self) -> str:
        return f"<MessageStream of {self._connection!r}>"
