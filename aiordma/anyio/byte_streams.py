"""Byte streams for anyio: a stream of the rsocket protocol, and its listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ByteStream as AnyioByteStream

import aiordma
from aiordma.anyio.attributes import Attributes, stream_attributes
from aiordma.anyio.listener_base import BaseListener
from aiordma.anyio.rules import adapter_checkpoint, raise_as_anyio
from aiordma.errors import RdmaError
from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.options import DEFAULT_LIMITS, ListenerLimits
from aiordma.streams import ByteStream, StreamListener, StreamOptions
from aiordma.streams.options import DEFAULT_OPTIONS
from aiordma.streams.stream import DEFAULT_READ

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.memory import MemoryRegion, MemorySlice

RECEIVING = "receiving from"
SENDING = "sending to"


class RdmaByteStream(AbortingContextManagerMixin, AnyioByteStream):
    """A reliable stream of bytes to a peer that uses rsocket: an anyio byte stream.

    It is made by `aiordma.anyio.connect_stream()` or an RdmaByteListener. `aclose()`, or the end of
    its `async with` block, closes it. A block that is cancelled closes it by force.

    One task may receive and one may send at a time. Every await is a checkpoint.
    """

    def __init__(self, stream: ByteStream) -> None:
        """Wrap `stream`, which belongs to the running loop, and own it from now on."""
        self._stream = stream
        self._receiving = ResourceGuard(RECEIVING)
        self._sending = ResourceGuard(SENDING)
        self._checkpoint = adapter_checkpoint()

    async def receive(self, max_bytes: int = DEFAULT_READ) -> bytes:
        """Wait for at least one byte, and return at most `max_bytes` bytes.

        Cancelling loses nothing.

        Raises:
            EndOfStream: the peer has finished sending, or closed the stream.
            ClosedResourceError: the stream was closed here, before or while this waited.
            BrokenResourceError: the connection failed, or ended without SHUTDOWN or DISCONNECT from
                the peer; `__cause__` is the reason.
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
        """Send all of `item`: bytes, or registered memory as in ByteStream.send().

        Bytes are copied: send() returns when all of them are posted. It waits while the buffers are
        full. Cancelling can leave a part of the data sent; the size of that part is not known.

        Raises:
            ClosedResourceError: the stream was closed here, or send_eof() was called.
            BrokenResourceError: the peer closed the stream, or the connection ended or failed;
                `__cause__` is the reason.
            BusyResourceError: another task is sending.
        """
        with self._sending:
            await self._checkpoint()
            try:
                await self._stream.send(item)
            except RdmaError as error:
                raise_as_anyio(error, SENDING, is_over=True)

    async def send_eof(self) -> None:
        """Finish sending: the peer receives the bytes sent before, and then the end.

        Receiving goes on. Idempotent. It does nothing if the peer has closed the stream. If it is
        cancelled, either the end is sent, or it is not and you can still send.

        Raises: ClosedResourceError, BrokenResourceError, BusyResourceError: as send().
        """
        with self._sending:
            await self._checkpoint()
            try:
                await self._stream.send_eof()
            except RdmaError as error:
                raise_as_anyio(error, SENDING, is_over=True)

    async def aclose(self) -> None:
        """Close gracefully: the bytes sent before reach the peer, which then receives the end.

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

        They are the family, addresses and ports of SocketAttribute; and `local_address`,
        `peer_address`, `device_name` and `stream` of RdmaAttribute.
        """
        return stream_attributes(self._stream)

    def __repr__(self) -> str:
        return f"<RdmaByteStream of {self._stream!r}>"


class RdmaByteListener(BaseListener[ByteStream, RdmaByteStream]):
    """A listener for byte streams. It is made by `aiordma.anyio.listen_stream()`.

    Closing it rejects the peers that were not accepted yet. The streams that were accepted stay
    open. Every await is a checkpoint.
    """

    def __init__(self, listener: StreamListener) -> None:
        """Wrap `listener`, which belongs to the running loop, and own it from now on."""
        super().__init__(listener, RdmaByteStream)
        self._accept_next = listener.accept

    async def accept(self) -> RdmaByteStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or does not use rsocket, is skipped. A peer that does not
        confirm delays no other. Cancelling loses no peer.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device that the listener was bound to was removed; `__cause__`
                is the reason.
            BusyResourceError: another task is waiting for peers.
            VerbsError: one peer could not be accepted, for example because memory was short. The
                listener stays open.
        """
        return await self._accept(self._accept_next)


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaByteStream]:
    """Connect to a peer that uses rsocket: `await connect_stream(...)`, or `async with`.

    The arguments, the exceptions and the effect of cancelling are those of
    aiordma.connect_stream().
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
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[RdmaByteListener]:
    """Listen for peers that use rsocket: `await listen_stream(...)`, or `async with`.

    The arguments, the exceptions and the effect of cancelling are those of
    aiordma.listen_stream().
    """

    async def listening() -> RdmaByteListener:
        return RdmaByteListener(
            await aiordma.listen_stream(host, port, backlog=backlog, limits=limits, options=options)
        )

    return AwaitableContextManager(listening())
