"""HTTP with aiohttp: requests and responses, over the transports of aiordma.asyncio or over TCP.

Also without a network, between a client and a server in one process: what aiohttp itself takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

import aiordma.asyncio
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all

BODY = bytes(1024)


class RdmaConnector(aiohttp.BaseConnector):
    """A connector of aiohttp's client that connects over RDMA."""

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        _, protocol = await aiordma.asyncio.create_connection(
            lambda: ResponseHandler(loop), req.url.host, req.url.port
        )
        return protocol


class MemoryTransport(asyncio.Transport):
    """A transport to a protocol in this process: it passes on what is written, and does no more."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._peer: MemoryTransport
        self._loop = asyncio.get_running_loop()
        self._is_closing = False

    @classmethod
    def connect(cls, near: asyncio.Protocol, far: asyncio.Protocol) -> None:
        """Connect two protocols."""
        transports = cls(near), cls(far)
        for transport, peer in zip(transports, reversed(transports), strict=True):
            transport._peer = peer
        for transport in transports:
            transport._protocol.connection_made(transport)

    def write(self, data: Any) -> None:
        """Have the loop pass the bytes to the peer's protocol."""
        self._loop.call_soon(self._peer._protocol.data_received, bytes(data))

    def is_closing(self) -> bool:
        """Return True after close()."""
        return self._is_closing

    def close(self) -> None:
        """Have the loop tell both protocols that the connection is closed."""
        for transport in (self, self._peer):
            if not transport._is_closing:
                transport._is_closing = True
                self._loop.call_soon(transport._protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        """Do nothing: the peer waits for the answer to each request."""

    def resume_reading(self) -> None:
        """Do nothing, as pause_reading()."""


class MemoryConnector(aiohttp.BaseConnector):
    """A connector of aiohttp's client to a server in this process."""

    def __init__(self, server: Callable[[], asyncio.Protocol], limit: int) -> None:
        super().__init__(limit=limit)
        self._server = server

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        protocol = ResponseHandler(asyncio.get_running_loop())
        MemoryTransport.connect(protocol, self._server())
        return protocol


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve over RDMA until the client asks to stop."""
    await _serve(aiordma.asyncio.create_server, host, announce)


async def serve_tcp(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve over TCP until the client asks to stop."""
    await _serve(asyncio.get_running_loop().create_server, host, announce)


async def _serve(
    create_server: Callable[..., Awaitable[Any]], host: str, announce: Callable[[int], None]
) -> None:
    stop = asyncio.Event()
    factory = _server(stop)
    server = await create_server(factory, host, 0)
    announce(server.sockets[0].getsockname()[1])
    await stop.wait()
    await factory.shutdown(1.0)
    server.close()
    await server.wait_closed()


def _server(stop: asyncio.Event) -> web.Server:
    """Return a server that answers each request with its body. A request for /stop sets `stop`."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/stop":
            stop.set()
        return web.Response(body=await request.read())

    return web.Server(answer)


async def measure(host: str, port: int, work: Work) -> Sample:
    """Send the requests of the work over RDMA."""
    return await _measure(RdmaConnector(limit=work.concurrency), _url(host, port), work)


async def measure_tcp(host: str, port: int, work: Work) -> Sample:
    """Send the requests of the work over TCP."""
    return await _measure(aiohttp.TCPConnector(limit=work.concurrency), _url(host, port), work)


async def measure_in_memory(host: str, port: int, work: Work) -> Sample:
    """Send the requests of the work to a server in this process. That of serve_tcp() only waits."""
    server = _server(asyncio.Event())
    url = _url(host, port)
    sample = await _measure(MemoryConnector(server, work.concurrency), url, work)
    await server.shutdown()
    async with aiohttp.ClientSession() as session, session.post(url + "stop") as response:
        await response.read()
    return sample


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


async def _measure(connector: aiohttp.BaseConnector, url: str, work: Work) -> Sample:
    async with aiohttp.ClientSession(connector=connector) as session:

        async def request(count: int) -> None:
            for _ in range(count):
                async with session.post(url, data=BODY) as response:
                    assert await response.read() == BODY

        async def all_of(count: int) -> None:
            each, more = divmod(count, work.concurrency)
            async with asyncio.TaskGroup() as tasks:
                for number in range(work.concurrency):
                    tasks.create_task(request(each + (number < more)))

        await all_of(max(work.warmup, work.concurrency))  # connects
        sample = await time_all(lambda: all_of(work.count), work.count, 1)
        async with session.post(url + "stop") as response:
            await response.read()
    return sample
