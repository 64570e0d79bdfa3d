"""RdmaStream: a byte stream of the rsocket protocol as a trio half-closeable stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio.abc import HalfCloseableStream

import aiordma
from aiordma.errors import RdmaError
from aiordma.streams import ByteStream
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream import DEFAULT_READ
from aiordma.trio.errors import raise_as_trio

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.memory import MemoryRegion, MemorySlice


class RdmaStream(HalfCloseableStream):
    """A reliable stream of bytes to a peer that uses rsocket, for trio programs.

    It is made by `aiordma.trio.connect_stream()` or an RdmaListener. `stream` is the ByteStream
    itself, with its addresses and its registered memory.
    """

    def __init__(self, stream: ByteStream) -> None:
        """Wrap `stream`, and own it from now on."""
        self.stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for at least one byte, and return at most `max_bytes` bytes; b"" at the end.

        Cancelling loses nothing.

        Raises:
            trio.BrokenResourceError: the connection failed, or ended without SHUTDOWN or DISCONNECT
                from the peer.
            trio.ClosedResourceError: the stream was closed here, before or while this waited.
            trio.BusyResourceError: another task is receiving.
            ValueError: `max_bytes` is less than 1.
        """
        try:
            return await self.stream.receive(DEFAULT_READ if max_bytes is None else max_bytes)
        except RdmaError as error:
            raise_as_trio(error)

    async def send_all(self, data: Buffer | MemorySlice | MemoryRegion) -> None:
        """Send all of `data`: bytes, or registered memory as in ByteStream.send().

        Cancelling can leave a part of the data sent; the size of that part is not known.

        Raises:
            trio.BrokenResourceError: the peer closed the stream, or the connection ended or failed.
            trio.ClosedResourceError: the stream was closed here, or send_eof() was called.
            trio.BusyResourceError: another task is sending.
        """
        try:
            await self.stream.send(data)
        except RdmaError as error:
            raise_as_trio(error)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until some bytes can be sent at once. Cancelling stops the wait only.

        Raises: as send_all().
        """
        try:
            await self.stream.wait_sendable()
        except RdmaError as error:
            raise_as_trio(error)

    async def send_eof(self) -> None:
        """Finish sending; receiving goes on. Idempotent.

        It does nothing if the peer has closed the stream. If it is cancelled, either the end is
        sent, or it is not and you can still send.

        Raises: as send_all(), except that it can be called again.
        """
        try:
            await self.stream.send_eof()
        except RdmaError as error:
            raise_as_trio(error)

    async def aclose(self) -> None:
        """Close gracefully: the bytes sent before reach the peer, which then receives the end.

        Cancelling closes the stream by force, as trio.aclose_forcefully() does. Idempotent.
        """
        await self.stream.aclose()

    def __repr__(self) -> str:
        return f"<RdmaStream of {self.stream!r}>"


async def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> RdmaStream:
    """Connect to a peer that uses rsocket, as trio.open_tcp_stream() connects over TCP.

    The arguments, the exceptions and the effect of cancelling are those of
    aiordma.connect_stream(). A ConnectError is an OSError, as trio programs expect.
    """
    return RdmaStream(
        await aiordma.connect_stream(host, port, local_address=local_address, options=options)
    )
