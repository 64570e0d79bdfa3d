"""HTTP with aiohttp: requests and responses, over the transports of aiordma.asyncio or over TCP."""

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

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/stop":
            stop.set()
        return web.Response(body=await request.read())

    factory = web.Server(answer)
    server = await create_server(factory, host, 0)
    announce(server.sockets[0].getsockname()[1])
    await stop.wait()
    await factory.shutdown(1.0)
    server.close()
    await server.wait_closed()


async def measure(host: str, port: int, work: Work) -> Sample:
    """Send the requests of the work over RDMA."""
    return await _measure(RdmaConnector(limit=work.concurrency), host, port, work)


async def measure_tcp(host: str, port: int, work: Work) -> Sample:
    """Send the requests of the work over TCP."""
    return await _measure(aiohttp.TCPConnector(limit=work.concurrency), host, port, work)


async def _measure(connector: aiohttp.BaseConnector, host: str, port: int, work: Work) -> Sample:
    url = f"http://{host}:{port}/"
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
