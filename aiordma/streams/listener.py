"""StreamListener: accepts peers that connect a byte stream. StreamRequest: one such peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma.cm import AsyncCmId
from aiordma.cm.accepting import BaseListener, BaseRequest
from aiordma.cm.establishing import create_listening_ids
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream import ByteStream
from aiordma.streams.stream_core import StreamCore


class StreamRequest(BaseRequest):
    """A peer that wants to connect a byte stream: accept it or reject it.

    A request that is dropped without an answer is rejected, with a ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, options: StreamOptions) -> None:
        """Called by StreamListener; not for users."""
        super().__init__(cm)
        self._options = options

    def accept(self) -> AwaitableContextManager[ByteStream]:
        """Accept: `await request.accept()`, or `async with request.accept() as stream`.

        Cancelling ends the connection; nothing is left behind. See rdma_accept(3).

        Raises:
            ProtocolError: the peer does not use the rsocket protocol; it is rejected.
            ConnectError: the peer gave up, or did not confirm the connection.
            DeviceRemoved: the device was removed.
            LocalClosed: the request was answered already.
            VerbsError: for example, not enough locked memory; the peer is rejected.
            ValueError: the options exceed the limits of the device; the peer is rejected.
        """
        return AwaitableContextManager(self._accept())

    async def _accept(self) -> ByteStream:
        return ByteStream(await accept_stream_core(self))

    async def reject(self) -> None:
        """Reject the peer, which gets Rejected. A peer that gave up already is no error.

        Cancelling does not undo the rejection.

        Raises:
            LocalClosed: the request was answered already.
        """
        await self._reject()


async def accept_stream_core(request: StreamRequest) -> StreamCore:
    """Accept a request and return its StreamCore, for an adapter.

    Raises: as StreamRequest.accept().
    """
    request._cm.check_unanswered()
    return await StreamCore.accept(request._cm, request._options)


class StreamListener(BaseListener[StreamRequest, ByteStream]):
    """A listener for byte streams: `async for request in listener`.

    It is made by `listen_stream()`. Closing it rejects the requests that were not taken yet. The
    streams that were accepted stay open.
    """

    def __init__(self, cms: list[AsyncCmId], options: StreamOptions) -> None:
        """Called by listen_stream(); not for users."""
        super().__init__(cms, lambda cm: StreamRequest(cm, options))

    async def accept(self) -> ByteStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or does not use rsocket, is skipped. Cancelling can lose the
        one peer that was just being accepted.

        Raises: as get_request(), and VerbsError as StreamRequest.accept().
        """
        return await self._accept_next(StreamRequest.accept)

    async def serve(self, handler: Callable[[ByteStream], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(stream)` for each in a separate task.

        The stream is closed when its handler returns. An exception that a handler raises is
        logged, and ends that stream only. The end of a connection by the peer is logged at level
        INFO. serve() returns when the listener is closed and the last handler has returned.

        Cancelling closes the listener and cancels every handler.

        Raises: as get_request(), except for LocalClosed.
        """
        await self._serve(StreamRequest.accept, handler)


def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[StreamListener]:
    """Listen for peers that use rsocket: `await listen_stream(...)`, or `async with`.

    `host`, `port`, `backlog` and the exceptions are those of listen(). `options` apply to the
    accepted streams.

    Cancelling leaves nothing behind. See rlisten in rsocket(7).
    """

    async def listening() -> StreamListener:
        return StreamListener(
            await create_listening_ids(host, port, backlog, options.connection_options()), options
        )

    return AwaitableContextManager(listening())
