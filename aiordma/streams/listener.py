"""StreamListener: the requests of peers who want a stream; StreamRequest: one of them."""

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
    """A peer that wants a byte stream: accept it or reject it.

    One that is just dropped is rejected, with a ResourceWarning.
    """

    def __init__(self, cm: AsyncCmId, options: StreamOptions) -> None:
        """For StreamListener; not to be called by others."""
        super().__init__(cm)
        self._options = options

    def accept(self) -> AwaitableContextManager[ByteStream]:
        """Accept: `await request.accept()`, or `async with request.accept() as stream`.

        Cancelling ends the connection; nothing is left behind. See rdma_accept(3).

        Raises:
            ProtocolError: the peer speaks something else than rsocket; it is rejected.
            ConnectError: the peer gave up, or did not confirm.
            DeviceRemoved: the device went away.
            LocalClosed: the request was answered already.
            VerbsError: not enough locked memory, for one; the peer is rejected.
            ValueError: the options are more than the device can do; the peer is rejected.
        """
        return AwaitableContextManager(self._accept())

    async def _accept(self) -> ByteStream:
        return ByteStream(await accept_stream_core(self))

    async def reject(self) -> None:
        """Refuse the peer, who gets Rejected. One that gave up already is no error.

        Cancelling does not take the refusal back.

        Raises:
            LocalClosed: the request was answered already.
        """
        await self._reject()


async def accept_stream_core(request: StreamRequest) -> StreamCore:
    """What a stream is made of, for other shells. Raises: as StreamRequest.accept()."""
    request._cm.check_unanswered()
    return await StreamCore.accept(request._cm, request._options)


class StreamListener(BaseListener[StreamRequest, ByteStream]):
    """Requests for streams, one after another: `async for request in listener`.

    From `listen_stream()`. Closing it rejects the requests that nobody has taken, and leaves the
    streams that were accepted alone.
    """

    def __init__(self, cms: list[AsyncCmId], options: StreamOptions) -> None:
        """For listen_stream(); not to be called by others."""
        super().__init__(cms, lambda cm: StreamRequest(cm, options))

    async def accept(self) -> ByteStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or does not speak rsocket, is passed over. Cancelling may lose
        the one peer that was just being accepted. Raises: as get_request(), and VerbsError as
        StreamRequest.accept.
        """
        return await self._accept_next(StreamRequest.accept)

    async def serve(self, handler: Callable[[ByteStream], Awaitable[object]]) -> None:
        """Accept every peer, and run `handler(stream)` for each in a task of its own.

        The stream is closed when its handler returns. An exception that a handler raises is
        logged, and ends that stream only; that a peer went away is no more than an INFO. Returns
        when the listener is closed, after the last handler has returned.

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
    """Listen for whoever speaks rsocket: `await listen_stream(...)`, or `async with`.

    `host`, `port`, `backlog` and what is raised are those of listen(). `options` are those of the
    streams that are accepted.

    Cancelling leaves nothing behind. See rsocket(7), rlisten.
    """

    async def listening() -> StreamListener:
        return StreamListener(
            await create_listening_ids(host, port, backlog, options.of_connection()), options
        )

    return AwaitableContextManager(listening())
