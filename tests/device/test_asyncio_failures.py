"""Failures in aiordma.asyncio: methods of protocols, writes after the end, wrong arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import loops
import pytest

from aiordma.asyncio import StreamServer, StreamTransport, create_server, open_connection
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.loops("asyncio", "uvloop")

SIZE = 2 << 20
"""Bytes that do not fit into the receive buffer of the peer."""


class Sender(asyncio.Protocol):
    """A protocol that sends SIZE bytes as soon as it is connected."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, StreamTransport)
        self.transport = transport
        transport.write(bytes(SIZE))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class WithoutMemory(Sender, asyncio.BufferedProtocol):
    """A protocol that has no memory for what it receives."""

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray()


@asynccontextmanager
async def served(
    address: DeviceAddress, protocol: Sender
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, StreamServer]]:
    """Yield the reader and the writer of a client, and the server whose protocol is `protocol`."""

    def is_called() -> bool:
        return hasattr(protocol, "transport") or protocol.lost.done()

    async with await create_server(lambda: protocol, address.host, 0) as server:
        reader, writer = await open_connection(*server.sockets[0].getsockname())
        await loops.until(is_called, "the protocol to be connected")
        yield reader, writer, server
        writer.transport.abort()
        server.abort_clients()


def reported_failures() -> list[str]:
    """Return the list of the messages that the event loop's exception handler will get."""
    messages: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: messages.append(context["message"]))
    return messages


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("method", ["connection_made", "eof_received"])
async def test_a_method_that_raises_ends_the_connection(
    address: DeviceAddress, method: str
) -> None:
    messages, protocol = reported_failures(), Sender()
    setattr(protocol, method, _fail)
    async with served(address, protocol) as (_, writer, __):
        writer.write_eof()
        assert isinstance(await protocol.lost, ZeroDivisionError)
    assert messages == [f"protocol.{method}() failed"]


async def test_an_empty_buffer_ends_the_connection(address: DeviceAddress) -> None:
    messages, protocol = reported_failures(), WithoutMemory()
    async with served(address, protocol) as (_, writer, __):
        writer.write(b"x")
        assert "empty buffer" in str(await protocol.lost)
    assert messages == ["the protocol failed on received data"]


async def test_pause_writing_that_raises_is_reported_only(address: DeviceAddress) -> None:
    messages, protocol = reported_failures(), Sender()
    protocol.pause_writing = protocol.resume_writing = _fail  # type: ignore[method-assign]
    async with served(address, protocol) as (reader, _, __):
        assert len(await reader.readexactly(SIZE)) == SIZE
    assert messages == [f"protocol.{name}_writing() failed" for name in ("pause", "resume")]


async def test_writes_after_the_end_are_ignored(address: DeviceAddress) -> None:
    """The peer has aborted, so the data that waits is dropped."""
    protocol = Sender()
    async with served(address, protocol) as (_, writer, __):
        writer.transport.abort()
        protocol.transport.pause_reading()
        protocol.transport.set_write_buffer_limits(low=1)
        assert isinstance(await protocol.lost, ConnectionError)
        assert protocol.transport.is_closing()
        protocol.transport.write(b"more")
        assert protocol.transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("end", [StreamServer.close_clients, StreamServer.abort_clients])
async def test_ending_the_clients_of_a_server(
    address: DeviceAddress, end: Callable[[StreamServer], None]
) -> None:
    protocol = Sender()
    async with served(address, protocol) as (reader, _, server):
        received = asyncio.create_task(reader.read())
        end(server)
        assert await protocol.lost is None
        if end is StreamServer.close_clients:
            assert await received == bytes(SIZE)
        else:
            with pytest.raises(ConnectionResetError):
                await received


async def test_what_a_server_and_a_transport_refuse(address: DeviceAddress) -> None:
    protocol = Sender()
    async with served(address, protocol) as (_, writer, server):
        assert server.get_loop() is asyncio.get_running_loop()
        assert address.host in repr(server)
        with pytest.raises(ValueError, match="high"):
            writer.transport.set_write_buffer_limits(high=1, low=2)
        with pytest.raises(TypeError, match="SSLContext"):
            await open_connection(*server.sockets[0].getsockname(), ssl=True)  # type: ignore[arg-type]
        server.close()
        with pytest.raises(RuntimeError, match="closed"):
            await server.start_serving()
