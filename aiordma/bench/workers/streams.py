"""Byte streams: ByteStream, asyncio's reader and writer over RDMA, and the same over TCP."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiordma
import aiordma.asyncio
from aiordma.bench.plan import Work
from aiordma.bench.rdmacm_utils import STREAM_BUFFER
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all, time_round_trips

DONE = b"done"
READ_SIZE = 1 << 18
LARGE_BUFFERS = aiordma.StreamOptions(send_buffer=STREAM_BUFFER, recv_buffer=STREAM_BUFFER)
"""The buffers for bandwidth."""


def options_for(work: Work) -> aiordma.StreamOptions:
    """Return the options of aiordma's streams for this work."""
    return LARGE_BUFFERS if work.test == "bandwidth" else aiordma.StreamOptions()


# --- the interface that server and client use ---


class Stream(Protocol):
    """One end of a byte stream of any kind."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""

    async def receive(self, nbytes: int) -> None:
        """Receive `nbytes` bytes and discard them.

        Raises:
            EOFError: the peer closed the stream before.
        """

    async def aclose(self) -> None:
        """Close the stream."""


class ByteStreamAdapter:
    """A Stream that is a ByteStream."""

    def __init__(self, stream: aiordma.ByteStream) -> None:
        self._stream = stream
        self.send = stream.send
        self.aclose = stream.aclose

    async def receive(self, nbytes: int) -> None:
        """See Stream."""
        await _receive(self._stream.receive, nbytes)


class WriterAdapter:
    """A Stream that is an asyncio reader and writer, of aiordma.asyncio or of TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """See Stream."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, nbytes: int) -> None:
        """See Stream."""
        await _receive(self._reader.read, nbytes)

    async def aclose(self) -> None:
        """See Stream."""
        self._writer.close()
        await self._writer.wait_closed()


async def _receive(read: Callable[[int], Awaitable[bytes]], nbytes: int) -> None:
    while nbytes:
        data = await read(min(nbytes, READ_SIZE))
        if not data:
            raise EOFError
        nbytes -= len(data)


# --- server and client ---


async def serve_stream(stream: Stream, work: Work) -> None:
    """Serve the client of a stream until it closes the stream."""
    message = bytes(work.size)
    if work.test == "latency":
        for _ in range(work.warmup + work.count):
            await stream.receive(work.size)
            await stream.send(message)
    else:
        for count in (work.warmup, work.count):
            await _receive_messages(stream, work, count)
            await stream.send(DONE)
    await _wait_for_end(stream)


async def _receive_messages(stream: Stream, work: Work, count: int) -> None:
    """Receive `count` messages: all bytes together for bandwidth, else one by one."""
    if work.test == "bandwidth":
        await stream.receive(work.size * count)
        return
    for _ in range(count):
        await stream.receive(work.size)


async def _wait_for_end(stream: Stream) -> None:
    try:
        await stream.receive(1)
    except EOFError:
        await stream.aclose()


async def measure_stream(stream: Stream, work: Work) -> Sample:
    """Do the work as the client of a stream, then close the stream."""
    message = bytes(work.size)

    async def exchange() -> None:
        await stream.send(message)
        await stream.receive(work.size)

    async def send(count: int) -> None:
        for _ in range(count):
            await stream.send(message)
        await stream.receive(len(DONE))

    if work.test == "latency":
        sample = await time_round_trips(exchange, work.count, work.warmup)
    else:
        await send(work.warmup)
        unit = work.size / 1e6 if work.test == "bandwidth" else 1
        sample = await time_all(lambda: send(work.count), work.count, unit)
    await stream.aclose()
    return sample


# --- ByteStream ---


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client on a ByteStream."""
    async with aiordma.listen_stream(host, 0, options=options_for(work)) as listener:
        announce(listener.local_address[1])
        await serve_stream(ByteStreamAdapter(await listener.accept()), work)


async def measure(host: str, port: int, work: Work) -> Sample:
    """Connect a ByteStream and do the work on it."""
    stream = await aiordma.connect_stream(host, port, options=options_for(work))
    return await measure_stream(ByteStreamAdapter(stream), work)


# --- streams of trio ---


class TrioAdapter:
    """A Stream that is a stream of trio, over RDMA or TCP."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.send = stream.send_all
        self.aclose = stream.aclose

    async def receive(self, nbytes: int) -> None:
        """See Stream."""
        await _receive(self._stream.receive_some, nbytes)


async def serve_trio(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client on a stream of aiordma.trio."""
    rdma = importlib.import_module("aiordma.trio")
    listener = await rdma.listen_stream(host, 0, options=options_for(work))
    announce(listener.local_address[1])
    await serve_stream(TrioAdapter(await listener.accept()), work)
    await listener.aclose()


async def measure_trio(host: str, port: int, work: Work) -> Sample:
    """Connect a stream of aiordma.trio and do the work on it."""
    rdma = importlib.import_module("aiordma.trio")
    stream = await rdma.connect_stream(host, port, options=options_for(work))
    return await measure_stream(TrioAdapter(stream), work)


async def serve_trio_tcp(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client on a TCP stream of trio."""
    trio = importlib.import_module("trio")
    (listener,) = await trio.open_tcp_listeners(0, host=host)
    announce(listener.socket.getsockname()[1])
    await serve_stream(TrioAdapter(await listener.accept()), work)
    await listener.aclose()


async def measure_trio_tcp(host: str, port: int, work: Work) -> Sample:
    """Connect a TCP stream of trio and do the work on it."""
    stream = await importlib.import_module("trio").open_tcp_stream(host, port)
    return await measure_stream(TrioAdapter(stream), work)


# --- asyncio's reader and writer ---


class _Socket(Protocol):
    def getsockname(self) -> Any: ...


class _Server(Protocol):
    @property
    def sockets(self) -> Sequence[_Socket]: ...

    def close(self) -> None: ...


StartServer = Callable[..., Awaitable[_Server]]
OpenConnection = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Writers:
    """Server and client on readers and writers, which these two functions make."""

    start_server: StartServer
    open_connection: OpenConnection
    make_arguments: Callable[[Work], dict[str, object]] = lambda work: {}
    """Returns keyword arguments for both functions."""

    async def serve(self, host: str, announce: Callable[[int], None], work: Work) -> None:
        """Serve one client."""
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        server = await self.start_server(
            lambda reader, writer: accepted.set_result(WriterAdapter(reader, writer)),
            host,
            0,
            **self.make_arguments(work),
        )
        announce(server.sockets[0].getsockname()[1])
        stream = await accepted
        server.close()
        await serve_stream(stream, work)

    async def measure(self, host: str, port: int, work: Work) -> Sample:
        """Connect and do the work."""
        ends = await self.open_connection(host, port, **self.make_arguments(work))
        return await measure_stream(WriterAdapter(*ends), work)


RDMA_WRITERS = Writers(
    aiordma.asyncio.start_server,
    aiordma.asyncio.open_connection,
    lambda work: {"options": options_for(work)},
)
TCP_WRITERS = Writers(asyncio.start_server, asyncio.open_connection)
