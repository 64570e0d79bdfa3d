"""aiohttp, an asyncio library that knows only TCP, as a server over RDMA."""

from __future__ import annotations

import asyncio

import h11
import pytest
from aiohttp import web
from helpers import TIME_LIMIT
from streaming import pattern

from aiordma.asyncio import create_server, open_connection
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

BODY = pattern(500_000)


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Reply with the reversed body."""
    sent = await request.read()
    return web.Response(body=sent[::-1])


async def test_aiohttp_server_as_protocol_factory(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        factory = web.Server(answer)
        server = await create_server(factory, address.host, 0)
        reader, writer = await open_connection(*server.sockets[0].getsockname())
        for body in (b"first", BODY):  # on one connection
            client = h11.Connection(h11.CLIENT)
            headers = [("host", "rdma.example"), ("content-length", str(len(body)))]
            for event in (
                h11.Request(method="POST", target="/", headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                writer.write(client.send(event) or b"")
            await writer.drain()
            received = b""
            while True:
                received_event = client.next_event()
                if received_event is h11.NEED_DATA:
                    client.receive_data(await reader.read(1 << 16))
                elif isinstance(received_event, h11.Response):
                    assert received_event.status_code == 200
                elif isinstance(received_event, h11.Data):
                    received += received_event.data
                elif isinstance(received_event, h11.EndOfMessage):
                    break
            assert received == body[::-1]
        writer.close()
        await writer.wait_closed()
        await factory.shutdown()
        server.close()
        await server.wait_closed()
