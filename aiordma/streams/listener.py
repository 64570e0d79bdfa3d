"""StreamListener: accepts peers that connect a byte stream. StreamRequest: one such peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma.cm import AsyncCmId
from aiordma.cm.accepting import BaseListener, BaseRequest
from aiordma.cm.establishing import create_listening_ids
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.options import DEFAULT_LIMITS, ListenerLimits
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream import ByteStream
from aiordma.streams.stream_core import StreamCore


class StreamRequest(BaseRequest):
    """A peer that wants to connect a byte stream: accept it or reject it.

    A request that is dropped without an answer is rejected, with a ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, options: StreamOptions, limits: ListenerLimits) -> None:
        """Called by StreamListener; not for users."""
        super().__init__(cm, limits.handshake_timeout)
        self._options = options

    def accept(self) -> AwaitableContextManager[ByteStream]:
        """Accept: `await request.accept()`, or `async with request.accept() as stream`.

        Cancelling ends the connection; nothing is left behind. See rdma_accept(3).

        Raises:
            ProtocolError: the peer does not use the rsocket protocol; it is rejected.
            ConnectError: the peer gave up, or did not confirm within `handshake_timeout`.
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
    async with request._handshake():
        return await StreamCore.accept(request._cm, request._options)


class StreamCoreListener(BaseListener[StreamRequest, StreamCore]):
    """A listener for an adapter: its connections are StreamCores."""

    def __init__(
        self, cms: list[AsyncCmId], options: StreamOptions, limits: ListenerLimits
    ) -> None:
        """Called by listen_stream_core()."""
        super().__init__(
            cms, limits, lambda cm: StreamRequest(cm, options, limits), accept_stream_core
        )


async def listen_stream_core(
    host: str | None, port: int, backlog: int, limits: ListenerLimits, options: StreamOptions
) -> StreamCoreListener:
    """Listen as listen_stream(), for an adapter."""
    cms = await create_listening_ids(host, port, backlog, options.connection_options())
    return StreamCoreListener(cms, options, limits)


class StreamListener(BaseListener[StreamRequest, ByteStream]):
    """A listener for byte streams: `async for request in listener`.

    It is made by `listen_stream()`. Closing it rejects the requests that were not taken yet. The
    streams that were accepted stay open.
    """

    def __init__(
        self, cms: list[AsyncCmId], options: StreamOptions, limits: ListenerLimits
    ) -> None:
        """Called by listen_stream(); not for users."""
        super().__init__(
            cms, limits, lambda cm: StreamRequest(cm, options, limits), StreamRequest.accept
        )

    async def accept(self) -> ByteStream:
        """Wait for the next peer that connects a stream, and return its stream.

        Peers are accepted as they arrive, as by Listener.accept(). A peer that gives up halfway, or
        does not use rsocket, is skipped. Cancelling loses no stream.

        Raises: as get_request(), and VerbsError as StreamRequest.accept().
        """
        return await self._accept_next(self._accept)

    async def serve(self, handler: Callable[[ByteStream], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(stream)` for each in a separate task.

        The stream is closed when its handler returns. An exception that a handler raises is
        logged, and ends that stream only. The end of a connection by the peer is logged at level
        INFO, at most once in 10 seconds, also if a task group of the handler raises it. If a peer
        cannot be accepted, for example because memory is short, an error is logged, at most once in
        10 seconds. serve() returns when the listener is closed and the last handler
        has returned.

        Cancelling closes the listener and cancels every handler.

        Raises: as get_request(), except for LocalClosed.
        """
        await self._serve(handler)


def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[StreamListener]:
    """Listen for peers that use rsocket: `await listen_stream(...)`, or `async with`.

    `host`, `port`, `backlog`, `limits` and the exceptions are those of listen(). `options` apply to
    the accepted streams.

    Cancelling leaves nothing behind. See rlisten in rsocket(7).
    """

    async def listening() -> StreamListener:
        cms = await create_listening_ids(host, port, backlog, options.connection_options())
        return StreamListener(cms, options, limits)

    return AwaitableContextManager(listening())
