"""Messages of any size for anyio: a message stream as an object stream, and its listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ObjectStream

import aiordma
from aiordma.anyio.attributes import Attributes, message_stream_attributes
from aiordma.anyio.listener_base import BaseListener
from aiordma.anyio.messages import RECEIVING, SENDING
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.errors import PeerClosed, RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.message_streams.connect import MessageListener
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.options import DEFAULT_OPTIONS, MessageOptions
from aiordma.options import DEFAULT_LIMITS, ListenerLimits

if TYPE_CHECKING:
    from aiordma.message_streams.frames import Frame


class RdmaMessageStream(AbortingContextManagerMixin, ObjectStream[bytes]):
    """Messages of any size, in order: an object stream of bytes with flow control and half close.

    It is made by `aiordma.anyio.connect_messages()` or an RdmaMessageListener. `aclose()`, or the
    end of its `async with` block, closes it. A block that is cancelled closes it by force.

    One task may receive at a time. Any number of tasks may send. Every await is a checkpoint.
    """

    def __init__(self, stream: MessageStream) -> None:
        """Wrap `stream`, which belongs to the running loop, and own it from now on."""
        self._stream = stream
        self._receiving = ResourceGuard(RECEIVING)
        self._checkpoint = adapter_checkpoint()

    async def receive(self) -> bytes:
        """Wait for the next message and return it; b"" is a message too.

        A message of several frames is returned as one. Messages that arrived before the peer
        disconnected are returned first. `async for` receives until EndOfStream.

        Cancelling loses no message.

        Raises:
            EndOfStream: the peer sends no further message, has disconnected, or its process ended.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the connection failed; `__cause__` is the reason, for example
                DeviceRemoved or ProtocolError.
            BusyResourceError: another task is receiving.
        """
        with self._receiving:
            await self._checkpoint()
            try:
                return await self._stream.recv()
            except PeerClosed as error:
                raise EndOfStream(str(error)) from error
            except RdmaError as error:
                raise_as_anyio(error, RECEIVING, is_over=self._stream.closed)

    async def send(self, item: Frame | Sequence[Frame]) -> None:
        """Send one message: bytes, or any other message that MessageStream.send() takes.

        A small message is copied: send() returns when it is posted, which waits until the peer has
        room for it. send() of a large one returns when the peer has read it.

        Cancelling before anything is posted sends nothing; the stream goes on.

        Raises:
            ValueError: the message has more frames or bytes than the peer takes. The stream goes
                on.
            ClosedResourceError: the stream was closed here, or send_eof() was called.
            BrokenResourceError: the peer has disconnected, or the connection failed; `__cause__` is
                the reason, for example PeerClosed or DeviceRemoved.
            VerbsError: ENOMEM when no more memory can be registered. The stream goes on.
        """
        await self._checkpoint()
        try:
            await self._stream.send(item)
        except RdmaError as error:
            raise_as_anyio(error, SENDING, is_over=self._stream.closed)

    async def send_eof(self) -> None:
        """End the sending: the peer gets EndOfStream after the messages before. Idempotent.

        If it is cancelled before the end is sent, nothing is sent, and you can still send.

        Raises: ClosedResourceError, BrokenResourceError: as send().
        """
        await self._checkpoint()
        try:
            await self._stream.send_eof()
        except RdmaError as error:
            raise_as_anyio(error, SENDING, is_over=self._stream.closed)

    async def aclose(self) -> None:
        """Close gracefully: the messages sent before reach the peer, then both sides disconnect.

        After `close_timeout` seconds the stream is closed by force. Tasks that receive or send get
        ClosedResourceError. Idempotent.

        Cancelling closes the stream by force, as anyio.aclose_forcefully() does.
        """
        await self._stream.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Close the stream by force, without waiting. Idempotent."""
        self._stream.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """The attributes for `extra()`.

        They are `local_address`, `peer_address`, `private_data`, `device_name` and `message_stream`
        of RdmaAttribute, and the family, addresses and ports of SocketAttribute.
        """
        return message_stream_attributes(self._stream)

    def __repr__(self) -> str:
        return f"<RdmaMessageStream of {self._stream!r}>"


class RdmaMessageListener(BaseListener[MessageStream, RdmaMessageStream]):
    """A listener for messages of any size. It is made by `aiordma.anyio.listen_messages()`.

    Closing it rejects the peers that were not accepted yet. The streams that were accepted stay
    open. Every await is a checkpoint.
    """

    def __init__(self, listener: MessageListener) -> None:
        """Wrap `listener`, which belongs to the running loop, and own it from now on."""
        super().__init__(listener, RdmaMessageStream)
        self._accept_next = listener.accept

    async def accept(self) -> RdmaMessageStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or does not use message streams, is skipped. A peer that does
        not confirm delays no other. Cancelling loses no peer.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device that the listener was bound to was removed; `__cause__`
                is the reason.
            BusyResourceError: another task is waiting for peers.
            VerbsError: one peer could not be accepted, for example because memory was short. The
                listener stays open.
        """
        return await self._accept(self._accept_next)


def connect_messages(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: MessageOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaMessageStream]:
    """Connect to a peer that uses messages of any size: `await` or `async with ... as stream`.

    The arguments, the exceptions and the effect of cancelling are those of
    aiordma.connect_messages(). A ConnectError is an OSError, as anyio programs expect.
    """

    async def connecting() -> RdmaMessageStream:
        stream = await aiordma.connect_messages(
            host, port, local_address=local_address, private_data=private_data, options=options
        )
        return RdmaMessageStream(stream)

    return AwaitableContextManager(connecting())


def listen_messages(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: MessageOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaMessageListener]:
    """Listen for peers that use messages of any size: `await` or `async with ... as listener`.

    The arguments, the exceptions and the effect of cancelling are those of
    aiordma.listen_messages().
    """

    async def listening() -> RdmaMessageListener:
        listener = await aiordma.listen_messages(
            host, port, backlog=backlog, limits=limits, options=options
        )
        return RdmaMessageListener(listener)

    return AwaitableContextManager(listening())
