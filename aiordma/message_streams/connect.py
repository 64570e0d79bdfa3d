"""connect_messages() and listen_messages(), and the listener of message streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.accepting import BaseListener, BaseRequest
from aiordma.cm.establishing import create_listening_ids, establish
from aiordma.errors import ProtocolError
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.options import DEFAULT_OPTIONS, MessageOptions
from aiordma.message_streams.wire import HELLO_SIZE, MAGIC, Hello
from aiordma.messages.connection import message_endpoint
from aiordma.options import DEFAULT_LIMITS, ListenerLimits, PrivateDataLimits, check_private_data


class MessageRequest(BaseRequest):
    """A peer that wants to connect a message stream: accept it or reject it.

    A request that is dropped without an answer is rejected, with a ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, options: MessageOptions, limits: ListenerLimits) -> None:
        """Called by MessageListener; not for users."""
        super().__init__(cm, limits.handshake_timeout)
        self._options = options
        self._private_data = cm.request.private_data if cm.request is not None else b""

    @property
    def private_data(self) -> bytes:
        """The private data of the peer's user. InfiniBand and RoCE pad it with zeros."""
        is_hello = self._private_data.startswith(MAGIC)
        return self._private_data[HELLO_SIZE:] if is_hello else b""

    def accept(self, private_data: bytes = b"") -> AwaitableContextManager[MessageStream]:
        """Accept: `await request.accept()`, or `async with request.accept() as stream`.

        Cancelling ends the connection; nothing is left behind. See rdma_accept(3).

        Raises:
            ProtocolError: the peer does not use message streams, or another version; it is
                rejected.
            Others: as ConnectRequest.accept().
        """
        return AwaitableContextManager(self._accept(private_data))

    async def _accept(self, private_data: bytes) -> MessageStream:
        self._cm.check_unanswered()
        data = self._options.hello().pack() + private_data
        try:
            check_private_data(data, PrivateDataLimits.of(self._cm.device()).accept)
        except ValueError:
            raise
        except BaseException as error:
            await close_after(self._cm, error)
            raise
        async with self._handshake():
            peer, user_data = Hello.unpack(self._private_data)
            endpoint = message_endpoint(self._cm, self._options.connection_options())
            await endpoint.accept(data)
        return MessageStream(endpoint, peer, user_data, self._options)

    async def reject(self, private_data: bytes = b"") -> None:
        """Reject the peer, which gets Rejected. A peer that gave up already is no error.

        Cancelling does not undo the rejection.

        Raises:
            LocalClosed: the request was answered already.
            ValueError: the private data is too long. The request can still be answered.
        """
        await self._reject(private_data)


class MessageListener(BaseListener[MessageRequest, MessageStream]):
    """A listener for message streams: `async for request in listener`.

    It is made by `listen_messages()`. Closing it rejects the requests that were not taken yet. The
    streams that were accepted stay open.
    """

    def __init__(
        self, cms: list[AsyncCmId], options: MessageOptions, limits: ListenerLimits
    ) -> None:
        """Called by listen_messages(); not for users."""
        super().__init__(
            cms, limits, lambda cm: MessageRequest(cm, options, limits), MessageRequest.accept
        )

    async def accept(self) -> MessageStream:
        """Wait for the next peer that connects a message stream, and return its stream.

        Peers are accepted as they arrive, as by Listener.accept(). A peer that gives up halfway, or
        does not use message streams, is skipped. Cancelling loses no stream.

        Raises: as get_request(), and VerbsError as MessageRequest.accept().
        """
        return await self._accept_next(self._accept)

    async def serve(self, handler: Callable[[MessageStream], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(stream)` for each in a separate task.

        Everything else is as with StreamListener.serve().

        Raises: as get_request(), except for LocalClosed.
        """
        await self._serve(handler)


def connect_messages(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: MessageOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[MessageStream]:
    """Connect to a peer that listens with listen_messages(): `await`, or `async with`.

    The arguments and the effect of cancelling are those of connect(). The private data can be 28
    bytes shorter.

    Raises:
        ProtocolError: the peer does not use message streams, or another version.
        Others: as connect().
    """

    async def finish(cm: AsyncCmId) -> MessageStream:
        data = options.hello().pack() + private_data
        try:
            endpoint = message_endpoint(cm, options.connection_options())
            await endpoint.connect(data)
            try:
                peer, user_data = Hello.unpack(endpoint.peer_private_data)
            except ProtocolError:
                endpoint.abort()
                raise
        except BaseException as error:
            await close_after(cm, error)
            raise
        return MessageStream(endpoint, peer, user_data, options)

    establishing = establish(host, port, local_address, options.connection_options(), finish)
    return AwaitableContextManager(establishing)


def listen_messages(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: MessageOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[MessageListener]:
    """Listen for peers that use connect_messages(): `await`, or `async with`.

    The arguments, the exceptions and the effect of cancelling are those of listen(). `options`
    apply to the accepted streams.
    """

    async def listening() -> MessageListener:
        cms = await create_listening_ids(host, port, backlog, options.connection_options())
        return MessageListener(cms, options, limits)

    return AwaitableContextManager(listening())
