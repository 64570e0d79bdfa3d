"""asyncio's reader and writer: of aiordma.asyncio, and over TCP on the loop's own transports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiordma.asyncio
from aiordma.bench.sample import Sample
from aiordma.bench.sides.talking import Peer, WriterPeer, answer, ask
from aiordma.bench.work import Work

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
