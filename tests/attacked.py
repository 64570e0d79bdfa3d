"""Servers and clients of each kind, to be attacked, and well-behaved peers of the servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import trio
from helpers import TIME_LIMIT
from hostile_peer import Targets

import aiordma
import aiordma.anyio
import aiordma.asyncio
import aiordma.trio
from aiordma import (
    ByteStream,
    Connection,
    ConnectionOptions,
    DatagramEndpoint,
    ListenerStats,
    RdmaError,
    RemoteBuffer,
)
from aiordma.anyio import RdmaByteStream, RdmaConnection
from aiordma.enums import TransportType
from aiordma.ping import server as ping_server
from aiordma.ping.client import ping
from aiordma.ping.options import PingOptions
from aiordma.ping.report import Statistics
from aiordma.rdmacm import DeviceAddress
from aiordma.trio import RdmaListener, RdmaStream

OPTIONS = ConnectionOptions(max_message_size=4096, recv_depth=16)
VISIT_SECONDS = 3.0

# What a hostile end can raise in a program: the errors of RDMA, of sockets, of anyio and of trio.
ENDS = (
    RdmaError,
    OSError,
    EOFError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


# --- handlers ---


async def obey(connection: Connection) -> None:
    """Echo each message. One that is a packed RemoteBuffer is written to and read from instead."""
    async with await connection.register(bytearray(64), connection.read_access) as region:
        async for message in connection:
            try:
                remote = RemoteBuffer.unpack(message)
            except ValueError:
                await connection.send(message)
            else:
                await connection.write(b"you asked for it"[: len(remote)], remote)
                await connection.read(remote[: len(region)], region)


async def echo_stream(stream: ByteStream) -> None:
    """Echo the bytes of a stream."""
    while data := await stream.receive():
        await stream.send(data)
    await stream.send_eof()


async def echo_asyncio(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo the bytes of a stream of asyncio."""
    with suppress(*ENDS):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def echo_anyio(stream: RdmaConnection | RdmaByteStream) -> None:
    """Echo what a stream of anyio receives. An exception would end the server."""
    with suppress(*ENDS):
        async for data in stream:
            await stream.send(data)


async def echo_trio(stream: RdmaStream) -> None:
    """Echo the bytes of a stream of trio. An exception would end the server."""
    with suppress(*ENDS):
        async for data in stream:
            await stream.send_all(data)


async def echo_datagrams(endpoint: DatagramEndpoint) -> None:
    """Echo each datagram, until the endpoint is closed."""
    async for datagram in endpoint:
        await endpoint.send_to(datagram.peer, datagram.data)


async def call_datagrams(host: str, port: int) -> None:
    """Send datagrams, which can be lost, until one is answered."""
    async with aiordma.open_datagram((host, 0)) as endpoint:
        peer = await endpoint.resolve(host, port)
        answer = asyncio.create_task(endpoint.recv_from())
        while not answer.done():
            await endpoint.send_to(peer, b"hello")
            await asyncio.wait([answer], timeout=0.1)
        assert (await answer).data == b"hello"


class TrioServer:
    """A server with trio.serve_listeners(), in a thread of its own."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self.port = 0

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._listener: RdmaListener = await aiordma.trio.listen_stream(self._host, 0)
        self.port = self._listener.local_address[1]
        with trio.CancelScope() as self._scope:
            self._started.set()
            await trio.serve_listeners(echo_trio, [self._listener])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve in the block."""
        self._thread.start()
        await asyncio.to_thread(self._started.wait, TIME_LIMIT)
        try:
            yield
        finally:
            self._token.run_sync_soon(self._scope.cancel)
            await asyncio.to_thread(self._thread.join, TIME_LIMIT)
            assert not self._thread.is_alive(), "the server of trio has not ended"

    @property
    def stats(self) -> ListenerStats:
        """The counts of the listener."""
        return self._listener.stats

    @property
    def is_serving(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()


class Servers:
    """The servers of one address, each in a task."""

    def __init__(self, address: DeviceAddress) -> None:
        self.host = address.host
        self.is_iwarp = address.transport is TransportType.IWARP
        self.targets = Targets(address.host, self.is_iwarp, [], [], [], [])
        self.ping_lines: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._trio: TrioServer | None = None
        self._stats: list[Callable[[], ListenerStats]] = []

    @asynccontextmanager
    async def running(self, *, simulated: bool = False) -> AsyncIterator[None]:
        """Serve in the block. Simulated devices have no threads for trio, and no TCP."""
        host = self.host
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            messages = await enter(aiordma.listen(host, 0, options=OPTIONS))
            streams = await enter(aiordma.listen_stream(host, 0))
            pings = await enter(aiordma.listen(host, 0))
            own_messages = await enter(aiordma.anyio.listen(host, 0, options=OPTIONS))
            own_streams = await enter(aiordma.anyio.listen_stream(host, 0))
            server = await aiordma.asyncio.start_server(echo_asyncio, host, 0)
            listeners = (messages, streams, own_messages, own_streams, server)
            self._stats = [lambda one=one: one.stats for one in listeners]  # type: ignore[misc]
            stream_ports = [streams.local_address[1], server.sockets[0].getsockname()[1]]
            anyio_ports = [
                one.extra(anyio.abc.SocketAttribute.local_port)
                for one in (own_messages, own_streams)
            ]
            stream_ports.append(anyio_ports[1])
            if not simulated:
                self._trio = TrioServer(host)
                await enter(self._trio.running())
                stream_ports.append(self._trio.port)
                self._stats.append(lambda: self._trio.stats)  # type: ignore[union-attr]
            tasks: list[Awaitable[None]] = [
                messages.serve(obey),
                streams.serve(echo_stream),
                ping_server.serve(pings, self.ping_lines.append),
                own_messages.serve(echo_anyio),
                own_streams.serve(echo_anyio),
            ]
            datagrams: list[int] = []
            if not self.is_iwarp:
                endpoint = await enter(aiordma.open_datagram((host, 0)))
                tasks += [endpoint.serve(), echo_datagrams(endpoint)]
                datagrams = [endpoint.local_address[1]]
            self._tasks = [asyncio.ensure_future(one) for one in tasks]
            self.targets = Targets(
                host,
                self.is_iwarp,
                [messages.local_address[1], anyio_ports[0]],
                stream_ports,
                [pings.local_address[1]],
                datagrams,
                has_tcp=not simulated,
            )
            yield
            server.close()
            await server.wait_closed()
            for one in self._tasks:
                one.cancel()
            await asyncio.wait(self._tasks, timeout=TIME_LIMIT)

    @property
    def accepted(self) -> int:
        """The number of connections that the servers have accepted."""
        pings = sum(": connected" in line for line in self.ping_lines)
        return pings + sum(stats().accepted for stats in self._stats)

    async def check(self) -> None:
        """Be a well-behaved peer of each server.

        Raises:
            TimeoutError: a server did not answer in time.
        """
        async with asyncio.timeout(TIME_LIMIT):
            for port in self.targets.messages + self.targets.pings:
                async with aiordma.connect(self.host, port) as connection:
                    await connection.send(b"hello")
                    assert await connection.recv() == b"hello"
            for port in self.targets.streams:
                async with aiordma.connect_stream(self.host, port) as stream:
                    await stream.send(b"hello")
                    assert await stream.receive() == b"hello"
            for port in self.targets.datagrams:
                await call_datagrams(self.host, port)
        assert not any(task.done() for task in self._tasks)
        assert self._trio is None or self._trio.is_serving


# --- clients of hostile listeners ---


class Clients:
    """Clients of each kind, which connect to hostile listeners."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.connected = 0
        """The number of clients that the listeners have accepted."""

    async def visit_all(self, ports: dict[str, int], *, simulated: bool = False) -> int:
        """Let a client of each kind connect. Return their number.

        Raises:
            Exception: one that a program does not expect of its peer.
        """
        messages, streams, pings = ports["messages"], ports["streams"], ports["pings"]
        visits = [
            self._messages(messages),
            self._streams(streams),
            self._pings(pings),
            self._anyio_messages(messages),
            self._anyio_streams(streams),
            self._asyncio(streams),
        ]
        for visit in visits:
            with suppress(*ENDS):
                async with asyncio.timeout(VISIT_SECONDS):
                    await visit
        if not simulated:
            await asyncio.to_thread(trio.run, self._trio, streams)
        return len(visits) + (not simulated)

    async def _messages(self, port: int) -> None:
        async with aiordma.connect(self._host, port, options=OPTIONS) as connection:
            self.connected += 1
            await connection.send(b"hello")
            await obey(connection)

    async def _streams(self, port: int) -> None:
        async with aiordma.connect_stream(self._host, port) as stream:
            self.connected += 1
            await stream.send(b"hello" * 1000)
            await echo_stream(stream)

    async def _pings(self, port: int) -> None:
        options = PingOptions(self._host, port, count=3, interval=0, wait=1)
        await ping(options, Statistics(), self._printed)

    def _printed(self, line: str) -> None:
        self.connected += "connection " in line
        assert line.isprintable()

    async def _anyio_messages(self, port: int) -> None:
        async with await aiordma.anyio.connect(self._host, port, options=OPTIONS) as stream:
            self.connected += 1
            await stream.send(b"hello")
            await echo_anyio(stream)

    async def _anyio_streams(self, port: int) -> None:
        async with await aiordma.anyio.connect_stream(self._host, port) as stream:
            self.connected += 1
            await stream.send(b"hello" * 1000)
            await echo_anyio(stream)

    async def _asyncio(self, port: int) -> None:
        reader, writer = await aiordma.asyncio.open_connection(self._host, port)
        self.connected += 1
        writer.write(b"hello" * 1000)
        try:
            await echo_asyncio(reader, writer)
        finally:
            writer.transport.abort()

    async def _trio(self, port: int) -> None:
        with suppress(*ENDS), trio.move_on_after(VISIT_SECONDS):
            async with await aiordma.trio.connect_stream(self._host, port) as stream:
                self.connected += 1
                await stream.send_all(b"hello" * 1000)
                await echo_trio(stream)


def failures_of_loop() -> Sequence[str]:
    """Return a list that gets a text for each exception that no task of the loop handles."""
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(f"{context.get('message')}: {context!r}")
    )
    return failures
