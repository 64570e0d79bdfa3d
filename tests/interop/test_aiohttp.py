"""aiohttp, an asyncio library that knows only TCP, as a server over RDMA."""

from __future__ import annotations

import pytest
from aiohttp import web
from streaming import pattern

from aiordma.asyncio import create_server, open_connection
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]

BODY = pattern(500_000)


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Reply with the reversed body."""
    sent = await request.read()
    return web.Response(body=sent[::-1])


async def test_aiohttp_server_as_protocol_factory(address: DeviceAddress) -> None:
    factory = web.Server(answer)
    server = await create_server(factory, address.host, 0)
    reader, writer = await open_connection(*server.sockets[0].getsockname())
    for body in (b"first", BODY):  # on one connection
        writer.write(b"POST / HTTP/1.1\r\nHost: rdma\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        await writer.drain()
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert headers.startswith(b"http/1.1 200 ok\r\n")
        assert b"content-length: %d\r\n" % len(body) in headers
        assert await reader.readexactly(len(body)) == body[::-1]
    writer.close()
    await writer.wait_closed()
    await factory.shutdown()
    server.close()
    await server.wait_closed()
