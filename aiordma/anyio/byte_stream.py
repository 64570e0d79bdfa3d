"""RdmaByteStream: a stream of rsocket's as a byte stream of anyio's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import EndOfStream, ResourceGuard
from anyio.abc import ByteStream as AnyioByteStream

from aiordma.anyio.attributes import Attributes, of_stream
from aiordma.anyio.checkpoints import owed_checkpoint
from aiordma.anyio.errors import raise_as_anyio
from aiordma.errors import RdmaError
from aiordma.loop.context_managers import AbortableBlock
from aiordma.streams import ByteStream
from aiordma.streams.stream import DEFAULT_READ

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.memory import MemoryRegion, MemorySlice

RECEIVING = "receiving from"
SENDING = "sending to"


class RdmaByteStream(AbortableBlock, AnyioByteStream):
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
        self._checkpoint = owed_checkpoint()

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
