"""ByteStream: bytes in order, both ways, to any program that uses rsocket."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING

from aiordma.loop.context_managers import AbortingContextManagerMixin, AwaitableContextManager
from aiordma.memory import MemoryRegion, MemorySlice, byte_view
from aiordma.memory.registrar import Registrar
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stats import StreamStats
from aiordma.streams.stream_core import StreamCore, connect_stream_core

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_READ = 1 << 16


class ByteStream(Registrar, AbortingContextManagerMixin):
    """A reliable stream of bytes over RDMA, like a TCP connection, on any event loop.

    It is made by `connect_stream()` or a StreamListener. The peer can be aiordma, any program that
    uses rsocket(7), or a TCP program that runs under librspreload. `aclose()`, or the end of its
    `async with` block, closes it. A stream that is dropped without closing gives a ResourceWarning
    and is aborted.

    One task may receive and one may send at a time.
    """

    def __init__(self, core: StreamCore) -> None:
        """Called by connect_stream() and StreamRequest.accept(); not for users."""
        super().__init__(core.endpoint)
        self._endpoint = core.endpoint
        self._core = core
        self._receiver = core.receiver
        self._receive = core.data_path.core.start_receive
        self._send = core.data_path.core.start_send

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` of this side."""
        return self._endpoint.local_address

    @property
    def peer_address(self) -> tuple[str, int]:
        """`(host, port)` of the peer."""
        return self._endpoint.peer_address

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that carries the stream."""
        return self._endpoint.device.name

    @property
    def closed(self) -> bool:
        """True if the stream has ended, here or at the peer.

        Bytes that were received before can still be read, unless the stream was closed here.
        """
        return self._endpoint.closed

    @property
    def peer_mappings(self) -> int:
        """The number of mappings that the peer takes: its RDMA_IOMAPSIZE or `mappings`."""
        return self._core.peer_mappings

    @property
    def stats(self) -> StreamStats:
        """A snapshot of the stream's counters, and of what waits."""
        return self._core.snapshot()

    def receive(self, max_bytes: int = DEFAULT_READ) -> Coroutine[object, None, bytes]:
        """Wait for at least one byte, and return at most `max_bytes` bytes; b"" at the end.

        The end is reached when the peer has finished sending, or has closed the stream. `async for`
        receives until the end.

        Cancelling loses nothing.

        Raises:
            PeerClosed: the connection ended without SHUTDOWN or DISCONNECT from the peer, for
                example because its process was killed.
            ProtocolError: the peer broke the rules of the rsocket protocol.
            WorkRequestError, DeviceRemoved: the connection failed.
            LocalClosed: the stream was closed here, before or while this waited.
            BusyError: another task is receiving.
            ValueError: `max_bytes` is less than 1.
            TypeError: `max_bytes` is not an integer.
        """
        receive = self._receive  # a local name first: see Connection.send()
        return receive(self, max_bytes)

    async def receive_into(self, buffer: Buffer | MemorySlice) -> int:
        """Wait for at least one byte, copy bytes to `buffer`, and return their number.

        The bytes are copied to the beginning of the buffer, as many as fit. At the end it returns
        0. Cancelling loses nothing.

        Raises: as receive(), and

            BufferError: the buffer is read-only, or not contiguous.
            ValueError: the buffer is empty.
        """
        with buffer.view if isinstance(buffer, MemorySlice) else memoryview(buffer) as view:
            if view.readonly or not view.c_contiguous:
                raise BufferError("receiving needs a contiguous, writable buffer")
            if not view.nbytes:
                raise ValueError("the buffer is empty")
            with byte_view(view) as memory:
                await self._receiver.wait_readable()
                return self._receiver.read_into(memory)

    def send(self, data: Buffer | MemorySlice | MemoryRegion) -> Coroutine[object, None, None]:
        """Send all of `data`: any bytes-like object, or registered memory.

        Bytes are copied: send() returns when all of them are posted. It waits while the receive
        buffer of the peer, or `send_buffer`, is full. Registered memory is not copied: send()
        returns when the memory may be reused. In both cases a later failure raises from the next
        call.

        Cancelling can leave a part of the data sent; the size of that part is not known.

        Raises:
            PeerClosed: the peer closed the stream, or its connection ended.
            ProtocolError, WorkRequestError, DeviceRemoved: the connection failed.
            LocalClosed: the stream was closed here, or send_eof() was called.
            BusyError: another task is sending.
            ValueError: the memory is closed, or not registered for this stream's device.
        """
        send = self._send
        return send(self, data)

    async def wait_sendable(self) -> None:
        """Wait until send() can post some bytes at once. Cancelling only stops the wait.

        Raises: as send().
        """
        await self._core.wait_writable()

    async def send_eof(self) -> None:
        """Finish sending: the peer reads the bytes sent before, and then the end.

        Receiving goes on. Idempotent. It does nothing if the peer has closed the stream. If it is
        cancelled, either the end is sent, or it is not and you can still send.

        Raises:
            LocalClosed: the stream was closed here.
            PeerClosed, ProtocolError, WorkRequestError, DeviceRemoved: the connection has ended.
            BusyError: another task is sending.
        """
        await self._core.send_eof()

    async def iomap(self, part: MemorySlice | MemoryRegion, offset: int) -> None:
        """Map registered memory of this side for the peer, which writes to it by riowrite().

        A peer that runs aiordma writes by iowrite(). The first byte of the memory has the offset
        `offset` for the peer. The peer receives the mapping before any data that is sent later. The
        memory stays pinned until the stream has ended, and the peer may write to it until then.
        Such a write gives no notification here. See riomap in rsocket(7).

        Cancelling before the mapping is posted maps nothing.

        Raises:
            ValueError: the peer takes no more mappings; an offset is below 0 or over 2^64 - 1; or
                the memory is not registered with REMOTE_WRITE, or not for this stream's device; or
                it is closed.
            TypeError: `offset` is not an integer.
            Others: as send().
        """
        await self._core.iomap(part[:], offset)

    async def iowrite(self, data: Buffer, offset: int) -> None:
        """Write `data` directly into memory that the peer has mapped: riowrite in rsocket(7).

        The data is copied: iowrite() returns when all of it is posted. It is in the peer's memory
        before the peer receives any data that is sent later. The peer gets no other notification.

        Cancelling can leave a part of the data written; the size of that part is not known.

        Raises:
            ValueError: no mapping that was received from the peer covers these offsets.
            Others: as send().
        """
        with memoryview(data) as view, byte_view(view) as memory:
            await self._core.iowrite(memory, offset)

    async def aclose(self) -> None:
        """Close gracefully: the bytes sent before reach the peer, which then reads the end.

        After `close_timeout` seconds the stream is ended by force. Tasks that wait on the stream
        get LocalClosed. Idempotent.

        Cancelling ends the stream by force. Its resources are destroyed in that case too.
        """
        await self._core.aclose()

    def abort(self) -> None:
        """End the stream at once. Bytes in flight can be lost. Idempotent.

        The resources are destroyed in the background.
        """
        self._core.abort()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the received bytes, in pieces of any size, until the end."""
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
        host, port = self.peer_address
        state = "closed" if self.closed else "open"
        return f"<ByteStream to {host} port {port}, {state}>"


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[ByteStream]:
    """Connect to a peer that uses rsocket: `await connect_stream(...)`, or `async with`.

    `host` is a name or an IPv4 or IPv6 address. The addresses of a name are tried in turn.
    `local_address` is the address to connect from.

    Cancelling leaves nothing behind. See rconnect in rsocket(7).

    Raises:
        ProtocolError: the peer that listens there does not use the rsocket protocol.
        Others: as connect().
    """

    async def connecting() -> ByteStream:
        return ByteStream(await connect_stream_core(host, port, local_address, options))

    return AwaitableContextManager(connecting())
