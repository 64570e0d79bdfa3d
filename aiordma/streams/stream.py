"""ByteStream: bytes in order, both ways, to every program that speaks rsocket."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from operator import index
from typing import TYPE_CHECKING

from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.memory import MemoryRegion, MemorySlice, byte_view
from aiordma.memory.registrar import Registrar
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream_core import StreamCore, connect_stream_core

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_READ = 1 << 16


class ByteStream(Registrar, AbortingContextManagerMixin):
    """A reliable stream of bytes over RDMA, as a TCP connection is one, on any event loop.

    From `connect_stream()` or a StreamListener. The other side may be aiordma's, any program that
    uses rsocket(7), or one for TCP that runs under librspreload. It is closed by `aclose()`, or by
    leaving its `async with` block; one that is just dropped warns, and is then aborted.

    One task may receive and one may send at a time.
    """

    def __init__(self, core: StreamCore) -> None:
        """For connect_stream() and StreamRequest.accept(); not to be called by others."""
        super().__init__(core.endpoint)
        self._endpoint = core.endpoint
        self._core = core
        self._local_address = core.endpoint.local_address
        self._peer_address = core.endpoint.peer_address

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the other side."""
        return self._peer_address

    @property
    def device_name(self) -> str:
        """The RDMA device it runs on."""
        return self._endpoint.device.name

    @property
    def closed(self) -> bool:
        """Whether it ended, here or at the peer. Bytes that came before can still be received if
        it was not ended here."""
        return self._endpoint.closed

    @property
    def peer_mappings(self) -> int:
        """How many mappings the peer takes, which is its RDMA_IOMAPSIZE or `mappings`: iomap()."""
        return self._core.peer_mappings

    async def receive(self, max_bytes: int = DEFAULT_READ) -> bytes:
        """Wait for bytes, and return at most `max_bytes` of those that are there; b"" at the end.

        The end is where the peer has finished sending, or closed the stream. `async for` receives
        until then.

        Cancelling loses nothing.

        Raises:
            PeerClosed: the peer went away without saying so: its process was killed, for one.
            ProtocolError: it broke rsocket's rules.
            WorkRequestError, DeviceRemoved: the connection failed.
            LocalClosed: the stream was closed here, before or while this waited.
            BusyError: another task is receiving.
            ValueError: `max_bytes` is less than 1.
            TypeError: it is no whole number.
        """
        if index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, not at least 1")
        await self._core.wait_readable()
        return self._core.read(max_bytes)

    async def receive_into(self, buffer: Buffer | MemorySlice) -> int:
        """Likewise into the beginning of `buffer`, which is filled at most; how many; 0 at the end.

        Raises: as receive(), and

            BufferError: the buffer is read-only, or not contiguous.
            ValueError: it is empty.
        """
        with buffer.view if isinstance(buffer, MemorySlice) else memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise BufferError("bytes need a contiguous buffer that can be written to")
            if not view.nbytes:
                raise ValueError("the buffer is empty")
            with byte_view(view) as memory:
                await self._core.wait_readable()
                return self._core.read_into(memory)

    async def send(self, data: Buffer | MemorySlice | MemoryRegion) -> None:
        """Send all of `data`: any bytes-like object, or registered memory.

        Bytes are copied: this returns when all of them are posted, which waits for the peer to read
        while its buffer, or `send_buffer`, is full. Registered memory is not copied: this returns
        when it may be reused. Either way a later failure raises from the next call.

        Cancelling leaves some of it sent: which, nothing tells.

        Raises:
            PeerClosed: the peer closed the stream, or went away.
            ProtocolError, WorkRequestError, DeviceRemoved: the connection failed.
            LocalClosed: the stream was closed here, or send_eof() was called.
            BusyError: another task is sending.
            ValueError: the memory is closed, or not registered for this stream's device.
        """
        if isinstance(data, (MemorySlice, MemoryRegion)):
            await self._core.send_registered(data[:])
        else:
            with memoryview(data) as view, byte_view(view) as memory:
                await self._core.send(memory)

    async def wait_sendable(self) -> None:
        """Wait until send() could post some bytes at once. Cancelling does nothing else.

        Raises: as send().
        """
        await self._core.wait_writable()

    async def send_eof(self) -> None:
        """Finish sending: the peer reads what was sent, and then the end. Receiving goes on.

        Idempotent; nothing is to be done where the peer has closed the stream.

        Raises:
            LocalClosed: the stream was closed here.
            PeerClosed, ProtocolError, WorkRequestError, DeviceRemoved: the connection has ended.
            BusyError: another task is sending.
        """
        await self._core.send_eof()

    async def iomap(self, part: MemorySlice | MemoryRegion, offset: int) -> None:
        """Let the peer write to registered memory of this side's by riowrite(), or iowrite().

        The first byte is at `offset` for the peer, which learns of it before what is sent next.
        The memory stays pinned until the stream has ended, and the peer may write there until
        then; nothing tells when it does. See riomap in rsocket(7).

        Cancelling before it is posted maps nothing.

        Raises:
            ValueError: the peer takes no more mappings, the memory is not registered for it
                (REMOTE_WRITE) or for this stream's device, or is closed.
            Others: as send().
        """
        await self._core.iomap(part[:], offset)

    async def iowrite(self, data: Buffer, offset: int) -> None:
        """Write `data` straight into memory that the peer has mapped: riowrite in rsocket(7).

        It is copied: this returns when all of it is posted. It is there before the peer receives
        what is sent next; otherwise the peer is not told.

        Cancelling leaves some of it written: which, nothing tells.

        Raises:
            ValueError: the peer has not mapped these offsets, as far as it has said.
            Others: as send().
        """
        with memoryview(data) as view, byte_view(view) as memory:
            await self._core.iowrite(memory, offset)

    async def aclose(self) -> None:
        """Close gracefully: what was sent reaches the peer, which then reads the end.

        Takes at most `close_timeout` seconds until what is left is ended by force. Tasks that wait
        get LocalClosed. Idempotent.

        Cancelling ends it by force: everything is destroyed all the same.
        """
        await self._core.aclose()

    def abort(self) -> None:
        """End it at once, without letting what was sent arrive. Idempotent.

        Everything is destroyed in the background.
        """
        self._core.abort()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over what comes, in pieces of any size, until the end."""
        return self

    async def __anext__(self) -> bytes:
        data = await self.receive()
        if not data:
            raise StopAsyncIteration
        return data

    def __del__(self) -> None:
        endpoint = getattr(self, "_endpoint", None)
        if endpoint is not None and not endpoint.released:
            name = repr(self)
            endpoint.abandon()
            warnings.warn(f"unclosed {name}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        host, port = self._peer_address
        state = "closed" if self.closed else "open"
        return f"<ByteStream to {host} port {port}, {state}>"


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[ByteStream]:
    """Connect to whoever speaks rsocket: `await connect_stream(...)`, or `async with`.

    `host` is a name or an IPv4 or IPv6 address; the addresses of a name are tried in turn.
    `local_address` is where to connect from.

    Cancelling leaves nothing behind. See rsocket(7), rconnect.

    Raises:
        ProtocolError: who listens there speaks something else.
        Others: as connect().
    """

    async def connecting() -> ByteStream:
        return ByteStream(await connect_stream_core(host, port, local_address, options))

    return AwaitableContextManager(connecting())
