"""Peer: one end of a byte stream, whatever it is made of; and what two of them do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import aiordma
import aiordma.asyncio
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all, time_round_trips

DONE = b"done"
READ = 1 << 18


class Peer(Protocol):
    """One end."""

    async def send(self, data: bytes) -> None:
        """Send all of it."""

    async def receive(self, nbytes: int) -> None:
        """Take so many bytes.

        Raises:
            EOFError: the other end was closed before.
        """

    async def aclose(self) -> None:
        """Close it."""


class BytesPeer:
    """A ByteStream."""

    def __init__(self, stream: aiordma.ByteStream) -> None:
        self._stream = stream
        self.send = stream.send
        self.aclose = stream.aclose

    async def receive(self, nbytes: int) -> None:
        """See Peer."""
        await _take_bytes(self._stream.receive, nbytes)


class WriterPeer:
    """A reader and a writer, of aiordma.asyncio or of TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """See Peer."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, nbytes: int) -> None:
        """See Peer."""
        await _take_bytes(self._reader.read, nbytes)

    async def aclose(self) -> None:
        """See Peer."""
        self._writer.close()
        await self._writer.wait_closed()


async def _take_bytes(read: Callable[[int], Awaitable[bytes]], nbytes: int) -> None:
    while nbytes:
        data = await read(min(nbytes, READ))
        if not data:
            raise EOFError
        nbytes -= len(data)


async def answer(peer: Peer, work: Work) -> None:
    """The server's part."""
    part = bytes(work.size)
    if work.test == "latency":
        for _ in range(work.warmup + work.count):
            await peer.receive(work.size)
            await peer.send(part)
    else:
        for count in (work.warmup, work.count):
            await _take(peer, work, count)
            await peer.send(DONE)
    await _ended(peer)


async def _take(peer: Peer, work: Work, count: int) -> None:
    """Receive message by message where messages count, and bytes where bytes do."""
    if work.test == "bandwidth":
        await peer.receive(work.size * count)
        return
    for _ in range(count):
        await peer.receive(work.size)


async def _ended(peer: Peer) -> None:
    try:
        await peer.receive(1)
    except EOFError:
        await peer.aclose()


async def ask(peer: Peer, work: Work) -> Sample:
    """The client's part."""
    part = bytes(work.size)

    async def exchange() -> None:
        await peer.send(part)
        await peer.receive(work.size)

    async def send(count: int) -> None:
        for _ in range(count):
            await peer.send(part)
        await peer.receive(len(DONE))

    if work.test == "latency":
        sample = await time_round_trips(exchange, work.count, work.warmup)
    else:
        await send(work.warmup)
        unit = work.size / 1e6 if work.test == "bandwidth" else 1
        sample = await time_all(lambda: send(work.count), work.count, unit)
    await peer.aclose()
    return sample


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client."""
    async with aiordma.listen_stream(host, 0) as listener:
        announce(listener.local_address[1])
        await answer(BytesPeer(await listener.accept()), work)


async def drive(host: str, port: int, work: Work) -> Sample:
    """Be the client."""
    return await ask(BytesPeer(await aiordma.connect_stream(host, port)), work)


StartServer = Callable[..., Awaitable[asyncio.AbstractServer]]
OpenConnection = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Writers:
    """Both sides, by the two functions that make readers and writers."""

    start_server: StartServer
    open_connection: OpenConnection

    async def serve(self, host: str, announce: Callable[[int], None], work: Work) -> None:
        """Serve one client."""
        found: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        server = await self.start_server(
            lambda reader, writer: found.set_result(WriterPeer(reader, writer)), host, 0
        )
        announce(server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        peer = await found
        server.close()
        await answer(peer, work)

    async def drive(self, host: str, port: int, work: Work) -> Sample:
        """Be the client."""
        return await ask(WriterPeer(*await self.open_connection(host, port)), work)


RDMA = Writers(aiordma.asyncio.start_server, aiordma.asyncio.open_connection)
TCP = Writers(asyncio.start_server, asyncio.open_connection)
