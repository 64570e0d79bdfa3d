"""asyncio's streams, transports and servers over RDMA: what asyncio promises of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from helpers import TIME_LIMIT
from streaming import pattern

import aiordma
from aiordma.asyncio import (
    StreamServer,
    StreamTransport,
    create_connection,
    create_server,
    open_connection,
    start_server,
)
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.loops("asyncio", "uvloop")

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def echo(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def talking_to(
    address: DeviceAddress, serve: aiordma.asyncio.OnConnected
) -> AsyncIterator[tuple[Reader, Writer]]:
    """A client of a server that runs `serve` for it."""
    async with asyncio.timeout(TIME_LIMIT):
        server = await start_server(serve, address.host, 0)
        try:
            reader, writer = await open_connection(*server.sockets[0].getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()
                await writer.wait_closed()
        finally:
            server.close()
            await server.wait_closed()


async def test_what_readers_and_writers_do(any_address: DeviceAddress) -> None:
    async with talking_to(any_address, echo) as (reader, writer):
        writer.write(b"a line\nand ")
        writer.writelines([b"another\n", bytearray(b"until;"), memoryview(b"exactly")])
        await writer.drain()
        assert await reader.readline() == b"a line\n"
        assert await reader.readline() == b"and another\n"
        assert await reader.readuntil(b";") == b"until;"
        assert await reader.readexactly(7) == b"exactly"
        assert writer.can_write_eof()
        assert not writer.is_closing()
        writer.write(b"the end")
        writer.write_eof()
        assert await reader.read() == b"the end"
        assert reader.at_eof()


async def test_what_the_transport_tells(address: DeviceAddress) -> None:
    seen: list[tuple[str, int]] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        seen.append(writer.get_extra_info("peername"))
        await echo(reader, writer)

    async with talking_to(address, serve) as (reader, writer):
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        assert writer.get_extra_info("peername")[0] == address.host
        assert writer.get_extra_info("sockname") == seen[0]
        assert writer.get_extra_info("rdma_device") == address.device
        assert writer.get_extra_info("socket") is None
        assert address.host in repr(writer.transport)


async def test_megabytes_through_a_writer(address: DeviceAddress) -> None:
    data = pattern(1 << 20)
    async with talking_to(address, echo) as (reader, writer):

        async def send() -> None:
            for start in range(0, len(data), 300_000):
                writer.write(data[start : start + 300_000])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read() == data
        await sending


async def test_drain_waits_at_the_high_water_mark(address: DeviceAddress) -> None:
    go_on = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await go_on.wait()
        await reader.read()
        writer.close()

    async with talking_to(address, serve) as (reader, writer):
        writer.transport.set_write_buffer_limits(high=10_000, low=1000)
        assert writer.transport.get_write_buffer_limits() == (1000, 10_000)
        writer.write(bytes(2 << 20))
        assert writer.transport.get_write_buffer_size() > 10_000
        draining = asyncio.create_task(writer.drain())
        await asyncio.sleep(0.3)
        assert not draining.done()
        go_on.set()
        await draining
        assert writer.transport.get_write_buffer_size() <= 1000
        writer.write_eof()
        assert await reader.read() == b""


async def test_what_was_written_arrives_though_it_is_closed(address: DeviceAddress) -> None:
    data = pattern(1 << 20)
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: Reader, writer: Writer) -> None:
        received.set_result(await reader.read())
        writer.close()

    async with talking_to(address, serve) as (_, writer):
        writer.write(data)
        writer.close()
        assert writer.is_closing()
        assert await received == data


async def test_a_peer_that_aborts_is_a_reset(address: DeviceAddress) -> None:
    async def serve(_: Reader, writer: Writer) -> None:
        writer.transport.abort()

    server = await start_server(serve, address.host, 0)
    reader, writer = await open_connection(*server.sockets[0].getsockname())
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    with pytest.raises(ConnectionResetError):
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_nobody_listens(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
    with pytest.raises(ConnectionError):
        await open_connection(host, port)


# --- protocols ---


class Recorder(asyncio.Protocol):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.data = b""
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, StreamTransport)
        self.transport = transport
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return False

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")
        self.lost.set_result(exc)


@asynccontextmanager
async def recorded(
    address: DeviceAddress,
) -> AsyncIterator[tuple[Recorder, Recorder, StreamServer]]:
    """A client's protocol, its server's, and the server."""
    made: asyncio.Future[Recorder] = asyncio.get_running_loop().create_future()

    def factory() -> Recorder:
        protocol = Recorder()
        made.set_result(protocol)
        return protocol

    async with asyncio.timeout(TIME_LIMIT), await create_server(factory, address.host, 0) as server:
        where = server.sockets[0].getsockname()
        transport, client = await create_connection(Recorder, *where)
        try:
            yield client, await made, server
        finally:
            transport.abort()
            server.abort_clients()


async def test_a_protocol_hears_everything_once_and_in_order(address: DeviceAddress) -> None:
    async with recorded(address) as (client, server, _):
        client.transport.write(b"hello")
        client.transport.close()
        client.transport.close()
        assert await client.lost is None
        assert await server.lost is None
    assert client.calls == ["made", "lost"]
    assert (server.calls, server.data) == (["made", "eof", "lost"], b"hello")


async def test_pausing_and_resuming(address: DeviceAddress) -> None:
    async with recorded(address) as (client, server, _):
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        data = pattern(2 << 20)
        client.transport.write(data)
        await asyncio.sleep(0.2)
        assert client.calls == ["made", "pause"]
        assert server.data == b""
        server.transport.resume_reading()
        while server.data != data:
            await asyncio.sleep(0.01)
        assert client.calls == ["made", "pause", "resume"]


async def test_an_answer_is_read_though_its_sender_is_gone(address: DeviceAddress) -> None:
    """The answer, the end and the disconnect are all there before any of it is looked at."""
    async with recorded(address) as (client, server, _):
        client.transport.write_eof()
        client.transport.pause_reading()
        server.transport.write(b"answer")
        server.transport.close()
        await server.lost
        await asyncio.sleep(0.1)
        client.transport.resume_reading()
        assert await client.lost is None
    assert (client.data, client.calls) == (b"answer", ["made", "eof", "lost"])


async def test_writing_after_the_end(address: DeviceAddress) -> None:
    async with recorded(address) as (client, _, __):
        client.transport.write_eof()
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            client.transport.write(b"more")
        client.transport.abort()
        assert await client.lost is None
        client.transport.close()


async def test_a_protocol_that_raises_ends_its_connection_only(address: DeviceAddress) -> None:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.append(context["message"])
    )
    async with recorded(address) as (client, server, _):
        server.data_received = _fail  # type: ignore[method-assign]
        client.transport.write(b"x")
        assert isinstance(await server.lost, ZeroDivisionError)
        assert isinstance(await client.lost, ConnectionResetError)
    assert complaints == ["the protocol failed on what was received"]


async def test_a_factory_that_raises_leaves_nothing(address: DeviceAddress) -> None:
    """Neither here nor at the peer."""

    def fail() -> asyncio.Protocol:
        raise ZeroDivisionError

    async with await create_server(fail, address.host, 0) as server:
        where = server.sockets[0].getsockname()
        with pytest.raises(ZeroDivisionError):
            await create_connection(fail, *where)
        reader, writer = await open_connection(*where)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()


def _fail(_: bytes) -> None:
    raise ZeroDivisionError


class Buffered(asyncio.BufferedProtocol):
    """Has its own memory filled."""

    def __init__(self) -> None:
        self.memory = bytearray(7)
        self.data = b""
        self.over = asyncio.Event()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.memory

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.memory[:nbytes]

    def eof_received(self) -> None:
        self.over.set()


async def test_a_buffered_protocol(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        server = await start_server(echo, address.host, 0)
        transport, protocol = await create_connection(Buffered, *server.sockets[0].getsockname())
        transport.write(b"more than seven bytes")
        transport.write_eof()
        await protocol.over.wait()
        assert protocol.data == b"more than seven bytes"
        server.close()
        await server.wait_closed()


# --- servers ---


async def test_a_server_that_serves_for_ever_until_it_is_cancelled(address: DeviceAddress) -> None:
    server = await start_server(echo, address.host, 0, start_serving=False)
    assert not server.is_serving()
    async with server:
        serving = asyncio.create_task(server.serve_forever())
        reader, writer = await open_connection(*server.sockets[0].getsockname())
        assert server.is_serving()
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        writer.close()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert server.sockets == ()
    assert not server.is_serving()


async def test_a_port_that_is_taken(address: DeviceAddress) -> None:
    async with await start_server(echo, address.host, 0) as server:
        with pytest.raises(OSError, match="taken"):
            await start_server(echo, *server.sockets[0].getsockname())


# --- TLS ---


@pytest.mark.loops("uvloop")
async def test_uvloop_puts_tls_on_its_own_transports_only(address: DeviceAddress) -> None:
    context = ssl.create_default_context()
    with pytest.raises(ValueError, match="its own transports"):
        await start_server(echo, address.host, 0, ssl=context)
    with pytest.raises(ValueError, match="its own transports"):
        await open_connection(address.host, 7471, ssl=context)


@pytest.mark.loops("asyncio")
@pytest.mark.may_block
async def test_tls(address: DeviceAddress) -> None:
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("rdma.example").configure_cert(server_side)
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    async with asyncio.timeout(TIME_LIMIT):
        server = await start_server(echo, address.host, 0, ssl=server_side)
        where = server.sockets[0].getsockname()
        with pytest.raises(ssl.SSLCertVerificationError):
            await open_connection(*where, ssl=ssl.create_default_context())
        with pytest.raises(TypeError, match="create_default_context"):
            await open_connection(*where, ssl=True)  # type: ignore[arg-type]
        reader, writer = await open_connection(
            *where, ssl=client_side, server_hostname="rdma.example"
        )
        writer.write(pattern(300_000))
        assert await reader.readexactly(300_000) == pattern(300_000)
        assert writer.get_extra_info("ssl_object") is not None
        assert writer.get_extra_info("rdma_device") == address.device
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
