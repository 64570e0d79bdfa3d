"""aiordma.anyio byte streams on a real device, on every loop: behaviour, TLS, HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import anyio
import h11
import httpcore
import httpx
import loops
import pytest
from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream
from anyio.abc import ByteStream, Listener, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSListener, TLSStream
from anyio_pairs import settle
from loops import until
from streaming import is_full, pattern, tls_contexts

import aiordma.anyio
from aiordma import PeerClosed, StreamOptions
from aiordma.anyio import RdmaAttribute, RdmaByteListener, RdmaByteStream
from aiordma.rdmacm import DeviceAddress

SMALL = StreamOptions(send_buffer=4096, recv_buffer=4096, send_depth=16, recv_depth=16)


class Pair(NamedTuple):
    near: RdmaByteStream
    far: RdmaByteStream
    listener: RdmaByteListener


@contextlib.asynccontextmanager
async def connected(address: DeviceAddress) -> AsyncIterator[Pair]:
    async with await aiordma.anyio.listen_stream(address.host, 0, options=SMALL) as listener:
        accepting = loops.create_task(listener.accept())
        where = listener.extra(RdmaAttribute.local_address)
        near = await aiordma.anyio.connect_stream(*where, options=SMALL)
        far = await accepting
        try:
            yield Pair(near, far, listener)
        finally:
            for stream in (near, far):
                stream.abort()
                await stream.aclose()


async def test_streams_carry_bytes_and_have_attributes(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, listener):
        assert isinstance(near, ByteStream)
        assert isinstance(listener, Listener)
        await near.send(b"0123456789")
        assert await far.receive(4) == b"0123"
        assert await far.receive() == b"456789"
        assert near.extra(SocketAttribute.remote_address) == far.extra(RdmaAttribute.local_address)
        assert near.extra(RdmaAttribute.device_name) == address.device
        assert near.extra(RdmaAttribute.stream).peer_address == near.extra(
            SocketAttribute.remote_address
        )


async def test_half_close_and_backpressure(address: DeviceAddress) -> None:
    data = pattern(100_000)
    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def send() -> None:
            await near.send(data)
            await near.send_eof()
            done.set()

        tasks.start_soon(send)
        receiver = far.extra(RdmaAttribute.stream)
        await until(lambda: is_full(receiver), "the receive buffer to be full")
        assert not done.is_set()
        received = b"".join([part async for part in far])
        assert received == data
        with pytest.raises(EndOfStream):
            await far.receive()
        with pytest.raises(ClosedResourceError):
            await near.send(b"x")
        await far.send(b"the other way")
        assert await near.receive() == b"the other way"


async def test_a_second_task_that_receives_or_sends_raises_busy(address: DeviceAddress) -> None:
    async with connected(address) as (near, _, __), anyio.create_task_group() as tasks:
        tasks.start_soon(near.receive)
        tasks.start_soon(near.send, bytes(100_000))
        await settle()
        with pytest.raises(BusyResourceError, match="receiving"):
            await near.receive()
        with pytest.raises(BusyResourceError, match="sending"):
            await near.send(b"x")
        with pytest.raises(BusyResourceError, match="sending"):
            await near.send_eof()
        tasks.cancel_scope.cancel()


async def test_closed_and_broken_streams_raise_anyio_exceptions(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, listener):
        near.abort()
        with pytest.raises(BrokenResourceError) as broken:
            await far.receive()
        assert isinstance(broken.value.__cause__, PeerClosed)
        with pytest.raises(BrokenResourceError):
            await far.send(b"x")
        with pytest.raises(ClosedResourceError):
            await near.receive()
        with pytest.raises(ClosedResourceError):
            await near.send(b"x")
        await listener.aclose()
        with pytest.raises(ClosedResourceError):
            await listener.accept()


async def test_tls_and_buffered_streams(address: DeviceAddress) -> None:
    server_side, client_side = tls_contexts()

    async def echo(stream: TLSStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data)

    plain = await aiordma.anyio.listen_stream(address.host, 0)
    async with TLSListener(plain, server_side) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        where = plain.extra(RdmaAttribute.local_address)
        stream = await TLSStream.wrap(
            await aiordma.anyio.connect_stream(*where),
            hostname="rdma.example",
            ssl_context=client_side,
        )
        async with stream:
            await stream.send(b"a line\n" + pattern(50_000))
            buffered = BufferedByteReceiveStream(stream)
            assert await buffered.receive_until(b"\n", 100) == b"a line"
            assert await buffered.receive_exactly(50_000) == pattern(50_000)
        tasks.cancel_scope.cancel()


# --- HTTP: httpx with connections over RDMA; h11 at the other end ---

PAGE = pattern(300_000)


async def serve_page(stream: RdmaByteStream) -> None:
    """Receive one request and send one response, with h11."""
    server = h11.Connection(h11.SERVER)
    while True:
        event = server.next_event()
        if event is h11.NEED_DATA:
            server.receive_data(await stream.receive())
        elif isinstance(event, h11.EndOfMessage):
            break
    headers = [("content-length", str(len(PAGE))), ("connection", "close")]
    await stream.send(server.send(h11.Response(status_code=200, headers=headers)) or b"")
    await stream.send(server.send(h11.Data(data=PAGE)) or b"")
    await stream.send(server.send(h11.EndOfMessage()) or b"")


class NetworkStream(httpcore.AsyncNetworkStream):
    """An httpcore stream over an anyio byte stream."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with anyio.fail_after(timeout):
            try:
                return await self._stream.receive(max_bytes)
            except EndOfStream:
                return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with anyio.fail_after(timeout):
            await self._stream.send(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> None:
        return None


class RdmaNetwork(httpcore.AsyncNetworkBackend):
    """An httpcore backend that connects over RDMA."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: object = None,
    ) -> NetworkStream:
        with anyio.fail_after(timeout):
            return NetworkStream(await aiordma.anyio.connect_stream(host, port))

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


async def test_httpx_fetches_a_page(address: DeviceAddress) -> None:
    transport = httpx.AsyncHTTPTransport()
    transport._pool = httpcore.AsyncConnectionPool(network_backend=RdmaNetwork())
    async with (
        await aiordma.anyio.listen_stream(address.host, 0) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, serve_page)
        host, port = listener.extra(RdmaAttribute.local_address)
        async with httpx.AsyncClient(transport=transport) as client:
            answer = await client.get(f"http://{host}:{port}/page")
        assert (answer.status_code, answer.content) == (200, PAGE)
        tasks.cancel_scope.cancel()
