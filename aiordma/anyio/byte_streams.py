"""Byte streams for anyio: a stream of rsocket's as a byte stream, and its listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ByteStream as AnyioByteStream

import aiordma
from aiordma.anyio.attributes import Attributes, of_stream
from aiordma.anyio.listener_base import BaseListener
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.errors import RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.streams import ByteStream, StreamListener, StreamOptions
from aiordma.streams.options import DEFAULT_OPTIONS
from aiordma.streams.stream import DEFAULT_READ

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.memory import MemoryRegion, MemorySlice

RECEIVING = "receiving from"
SENDING = "sending to"


class RdmaByteStream(AbortingContextManagerMixin, AnyioByteStream):
    """A reliable stream of bytes to whoever speaks rsocket: a byte stream of anyio's.

    From `aiordma.anyio.connect_stream()` or an RdmaByteListener. It is closed by `aclose()`, or by
    leaving an `async with` block of it; a block that is cancelled closes it by force.

    One task may receive and one may send at a time. Every await is a checkpoint.
    """

    def __init__(self, stream: ByteStream) -> None:
        """Present a stream of this loop's as one of anyio's, which owns it from now on."""
        self._stream = stream
        self._receiving = ResourceGuard(RECEIVING)
        self._sending = ResourceGuard(SENDING)
        self._checkpoint = adapter_checkpoint()

    async def receive(self, max_bytes: int = DEFAULT_READ) -> bytes:
        """Wait for bytes, and return at most `max_bytes` of those that are there.

        Cancelling loses nothing.

        Raises:
            EndOfStream: the peer has finished sending, or closed the stream.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the peer vanished, or the connection failed; `__cause__` tells how.
            BusyResourceError: another task is receiving.
            ValueError: `max_bytes` is less than 1.
        """
        with self._receiving:
            await self._checkpoint()
            try:
                data = await self._stream.receive(max_bytes)
            except RdmaError as error:
                raise_as_anyio(error, RECEIVING, is_over=self._stream.closed)
        if not data:
            raise EndOfStream
        return data

    async def send(self, item: Buffer | MemorySlice | MemoryRegion) -> None:
        """Send all of it: bytes, or whatever else ByteStream.send() takes.

        Bytes are copied: this returns when all of them are posted, which waits for the peer to
        read what came before. Cancelling leaves some of it sent: which, nothing tells.

        Raises:
            ClosedResourceError: the stream was closed here, or send_eof() was called.
            BrokenResourceError: the peer closed the stream, vanished, or the connection failed;
                `__cause__` tells how.
            BusyResourceError: another task is sending.
        """
        with self._sending:
            await self._checkpoint()
            try:
                await self._stream.send(item)
            except RdmaError as error:
                raise_as_anyio(error, SENDING, is_over=True)

    async def send_eof(self) -> None:
        """Finish sending: the peer receives what was sent, and then the end. Receiving goes on.

        Idempotent. Raises: as send().
        """
        with self._sending:
            await self._checkpoint()
            try:
                await self._stream.send_eof()
            except RdmaError as error:
                raise_as_anyio(error, SENDING, is_over=True)

    async def aclose(self) -> None:
        """Close gracefully: what was sent reaches the peer, which then receives the end.

        Takes at most `close_timeout` seconds until what is left is ended by force. Tasks that
        receive or send get ClosedResourceError. Idempotent.

        Cancelling closes it by force, as anyio.aclose_forcefully() does.
        """
        await self._stream.aclose()
        await self._checkpoint()

    def abort(self) -> None:
        """Close it by force, without waiting. Idempotent."""
        self._stream.abort()

    @property
    def extra_attributes(self) -> Attributes:
        """SocketAttribute's family, addresses and ports; RdmaAttribute's local_address,
        peer_address, device_name and stream."""
        return of_stream(self._stream)

    def __repr__(self) -> str:
        return f"<RdmaByteStream of {self._stream!r}>"


class RdmaByteListener(BaseListener[ByteStream, RdmaByteStream]):
    """Accepts peers. From `aiordma.anyio.listen_stream()`.

    Closing it rejects the peers that nobody has taken, and leaves the streams that were accepted
    alone. Every await is a checkpoint.
    """

    def __init__(self, listener: StreamListener) -> None:
        """Present a listener of this loop's as one of anyio's, which owns it from now on."""
        super().__init__(listener, RdmaByteStream)
        self._accept_next = listener.accept

    async def accept(self) -> RdmaByteStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or speaks no rsocket, is passed over. Cancelling may lose the
        one peer that was just being accepted.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device it was bound to went away; its `__cause__` says so.
            BusyResourceError: another task is waiting for peers.
            VerbsError: a peer could not be accepted, for want of memory for one; others still can.
        """
        return await self._accept(self._accept_next)


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaByteStream]:
    """Connect to whoever speaks rsocket: `await connect_stream(...)`, or `async with`.

    As aiordma.connect_stream(), with its arguments, its exceptions and what cancelling does.
    """

    async def connecting() -> RdmaByteStream:
        return RdmaByteStream(
            await aiordma.connect_stream(host, port, local_address=local_address, options=options)
        )

    return AwaitableContextManager(connecting())


def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaByteListener]:
    """Listen for whoever speaks rsocket: `await listen_stream(...)`, or `async with`.

    As aiordma.listen_stream(), with its arguments, its exceptions and what cancelling does.
    """

    async def listening() -> RdmaByteListener:
        return RdmaByteListener(
            await aiordma.listen_stream(host, port, backlog=backlog, options=options)
        )

    return AwaitableContextManager(listening())
