"""Streams, transports and servers of aiordma.asyncio: they behave like those of asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import loops
import pytest
from streaming import is_full, pattern, tls_contexts

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

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]


async def echo(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def client_of(address: DeviceAddress, serve: Serve) -> AsyncIterator[tuple[Reader, Writer]]:
    """Start a server that runs `serve`, and yield the reader and the writer of a client."""
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


async def test_methods_of_reader_and_writer(any_address: DeviceAddress) -> None:
    async with client_of(any_address, echo) as (reader, writer):
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


async def test_extra_info_of_the_transport(address: DeviceAddress) -> None:
    seen: list[tuple[str, int]] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        seen.append(writer.get_extra_info("peername"))
        await echo(reader, writer)

    async with client_of(address, serve) as (reader, writer):
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        assert writer.get_extra_info("peername")[0] == address.host
        assert writer.get_extra_info("sockname") == seen[0]
        assert writer.get_extra_info("rdma_device") == address.device
        assert writer.get_extra_info("socket") is None
        assert address.host in repr(writer.transport)


async def test_a_megabyte_through_a_writer_arrives(address: DeviceAddress) -> None:
    data = pattern(1 << 20)
    async with client_of(address, echo) as (reader, writer):

        async def send() -> None:
            for start in range(0, len(data), 300_000):
                writer.write(data[start : start + 300_000])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read() == data
        await sending


def is_held_back(server: StreamTransport) -> bool:
    """Return True if a transport does not read, and its peer can send it no more data."""
    return not server.is_reading() and is_full(server.core)


async def test_drain_waits_at_the_high_water_mark(address: DeviceAddress) -> None:
    go_on = asyncio.Event()
    servers: list[StreamTransport] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        assert isinstance(writer.transport, StreamTransport)
        servers.append(writer.transport)
        await go_on.wait()
        await reader.read()
        writer.close()

    async with client_of(address, serve) as (reader, writer):
        writer.transport.set_write_buffer_limits(high=10_000, low=1000)
        assert writer.transport.get_write_buffer_limits() == (1000, 10_000)
        writer.write(bytes(2 << 20))
        assert writer.transport.get_write_buffer_size() > 10_000
        draining = asyncio.create_task(writer.drain())
        await loops.until(lambda: servers and is_held_back(servers[0]), "the server to be full")
        assert not draining.done()
        go_on.set()
        await draining
        assert writer.transport.get_write_buffer_size() <= 1000
        writer.write_eof()
        assert await reader.read() == b""


async def test_data_written_before_close_arrives(address: DeviceAddress) -> None:
    data = pattern(1 << 20)
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: Reader, writer: Writer) -> None:
        received.set_result(await reader.read())
        writer.close()

    async with client_of(address, serve) as (_, writer):
        writer.write(data)
        writer.close()
        assert writer.is_closing()
        assert await received == data


async def test_abort_by_the_peer_raises_connection_reset_error(address: DeviceAddress) -> None:
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


async def test_connect_without_a_listener_raises_connection_error(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
    with pytest.raises(ConnectionError):
        await open_connection(host, port)


# --- protocols ---


class Recorder(asyncio.Protocol):
    """A protocol that records which of its methods are called."""

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
    """Yield the protocols of a client and of its server side, and the server."""
    made: asyncio.Future[Recorder] = asyncio.get_running_loop().create_future()

    def factory() -> Recorder:
        protocol = Recorder()
        made.set_result(protocol)
        return protocol

    async with await create_server(factory, address.host, 0) as server:
        where = server.sockets[0].getsockname()
        transport, client = await create_connection(Recorder, *where)
        try:
            yield client, await made, server
        finally:
            transport.abort()
            server.abort_clients()


async def test_protocol_methods_are_called_once_and_in_order(address: DeviceAddress) -> None:
    async with recorded(address) as (client, server, _):
        client.transport.write(b"hello")
        client.transport.close()
        client.transport.close()
        assert await client.lost is None
        assert await server.lost is None
    assert client.calls == ["made", "lost"]
    assert (server.calls, server.data) == (["made", "eof", "lost"], b"hello")


async def test_pausing_and_resuming_of_reads_and_writes(address: DeviceAddress) -> None:
    async with recorded(address) as (client, server, _):
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        data = pattern(2 << 20)
        client.transport.write(data)
        await loops.until(lambda: is_held_back(server.transport), "the server to be full")
        assert client.calls == ["made", "pause"]
        assert server.data == b""
        server.transport.resume_reading()
        await loops.until(lambda: len(server.data) >= len(data), "all data to arrive")
        assert server.data == data
        assert client.calls == ["made", "pause", "resume"]


async def test_data_can_be_read_after_the_peer_disconnected(address: DeviceAddress) -> None:
    """The data, the end and the disconnect arrive before reading is resumed."""
    async with recorded(address) as (client, server, _):
        client.transport.write_eof()
        client.transport.pause_reading()
        server.transport.write(b"answer")
        server.transport.close()
        await server.lost
        endpoint = client.transport.core.endpoint
        await loops.until(lambda: endpoint.is_drained, "the disconnect to arrive")
        client.transport.resume_reading()
        assert await client.lost is None
    assert (client.data, client.calls) == (b"answer", ["made", "eof", "lost"])


async def test_write_after_write_eof_raises_runtime_error(address: DeviceAddress) -> None:
    async with recorded(address) as (client, _, __):
        client.transport.write_eof()
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            client.transport.write(b"more")
        client.transport.abort()
        assert await client.lost is None
        client.transport.close()


async def test_a_protocol_that_raises_ends_its_connection_only(address: DeviceAddress) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(context["message"])
    )
    async with recorded(address) as (client, server, _):
        server.data_received = _fail  # type: ignore[method-assign]
        client.transport.write(b"x")
        assert isinstance(await server.lost, ZeroDivisionError)
        assert isinstance(await client.lost, ConnectionResetError)
    assert errors == ["the protocol failed on received data"]


async def test_a_factory_that_raises_closes_the_connection(address: DeviceAddress) -> None:
    """No connection stays open on either side."""

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


def _fail(data: bytes) -> None:
    raise ZeroDivisionError


class Buffered(asyncio.BufferedProtocol):
    """A protocol that receives into its own memory."""

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


async def test_a_buffered_protocol_receives_into_its_memory(address: DeviceAddress) -> None:
    server = await start_server(echo, address.host, 0)
    transport, protocol = await create_connection(Buffered, *server.sockets[0].getsockname())
    transport.write(b"more than seven bytes")
    transport.write_eof()
    await protocol.over.wait()
    assert protocol.data == b"more than seven bytes"
    server.close()
    await server.wait_closed()


# --- servers ---


async def test_cancelling_serve_forever_closes_the_server(address: DeviceAddress) -> None:
    server = await start_server(echo, address.host, 0, start_serving=False)
    assert not server.is_serving()
    async with server:
        serving = asyncio.create_task(server.serve_forever())
        reader, writer = await open_connection(*server.sockets[0].getsockname())
        assert server.is_serving()
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert await reader.read() == b""  # the idle connection is closed, too
        writer.close()
    assert server.sockets == ()
    assert not server.is_serving()


async def test_start_server_on_a_port_in_use_fails(address: DeviceAddress) -> None:
    async with await start_server(echo, address.host, 0) as server:
        with pytest.raises(OSError, match="in use"):
            await start_server(echo, *server.sockets[0].getsockname())


# --- TLS ---


@pytest.mark.loops("uvloop")
async def test_tls_on_uvloop_is_refused(address: DeviceAddress) -> None:
    context = ssl.create_default_context()
    with pytest.raises(ValueError, match="its own transports"):
        await start_server(echo, address.host, 0, ssl=context)
    with pytest.raises(ValueError, match="its own transports"):
        await open_connection(address.host, 7471, ssl=context)


@pytest.mark.loops("asyncio")
@pytest.mark.may_block
async def test_tls_verifies_the_server_and_carries_data(address: DeviceAddress) -> None:
    server_side, client_side = tls_contexts()
    server = await start_server(echo, address.host, 0, ssl=server_side)
    where = server.sockets[0].getsockname()
    with pytest.raises(ssl.SSLCertVerificationError):
        await open_connection(*where, ssl=ssl.create_default_context())
    with pytest.raises(TypeError, match="create_default_context"):
        await open_connection(*where, ssl=True)  # type: ignore[arg-type]
    reader, writer = await open_connection(*where, ssl=client_side, server_hostname="rdma.example")
    writer.write(pattern(300_000))
    assert await reader.readexactly(300_000) == pattern(300_000)
    assert writer.get_extra_info("ssl_object") is not None
    assert writer.get_extra_info("rdma_device") == address.device
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.loops("asyncio")
@pytest.mark.may_block
async def test_tls_can_begin_on_a_connection_that_was_used(address: DeviceAddress) -> None:
    """From start_tls() on, the bytes of the stream are those of TLS, not those of the reader."""
    server_side, client_side = tls_contexts()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"STARTTLS\n"
        writer.write(b"go\n")
        await writer.start_tls(server_side)
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await start_server(serve, address.host, 0)
    reader, writer = await open_connection(*server.sockets[0].getsockname())
    writer.write(b"STARTTLS\n")
    assert await reader.readline() == b"go\n"
    await writer.start_tls(client_side, server_hostname="rdma.example")
    for number in range(10):
        writer.write(pattern(1000, number))
        assert await reader.readexactly(1000) == pattern(1000, number)
    writer.close()
    server.close()
    await server.wait_closed()


class Greeter(asyncio.Protocol):
    """Greets when it has its transport. Notes the calls in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.greeted, self.lost = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.calls.append("made")
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self.calls.append("data")
        self.greeted.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@pytest.mark.loops("asyncio")
@pytest.mark.may_block
async def test_a_protocol_over_tls_has_its_transport_first(address: DeviceAddress) -> None:
    server_side, client_side = tls_contexts()
    made: list[Greeter] = []

    def make() -> Greeter:
        made.append(Greeter())
        return made[-1]

    name = "rdma.example"
    async with await create_server(make, address.host, 0, ssl=server_side) as server:
        host, port = server.sockets[0].getsockname()
        await create_connection(make, host, port, ssl=client_side, server_hostname=name)
        greeters = list(made)
        for greeter in greeters:
            await greeter.greeted.wait()
            assert greeter.calls[:2] == ["made", "data"]

        class Failing(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                raise KeyError("a failure of the user")

        with pytest.raises(KeyError, match="a failure of the user"):
            await create_connection(Failing, host, port, ssl=client_side, server_hostname=name)
        for greeter in greeters:
            greeter.transport.close()
            await greeter.lost.wait()
