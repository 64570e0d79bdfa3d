"""Messages with the C programs rdma_client and rdma_server of rdma-core.

The client sends one message of 16 bytes, the server replies with one, and both disconnect.
"""

from __future__ import annotations

import asyncio

import pytest
from helpers import TIME_LIMIT
from programs import connect_when_it_listens, end, free_port, start

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SIZE = 16
# The programs request no RDMA reads, and post one receive buffer of 16 bytes.
OPTIONS = ConnectionOptions(max_message_size=SIZE, responder_resources=0, initiator_depth=0)


async def test_aiordma_connects_to_rdma_server(any_address: DeviceAddress) -> None:
    port = await free_port(any_address)
    server = await start("rdma_server", "-s", any_address.host, "-p", port)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            connection = await connect_when_it_listens(any_address.host, int(port), OPTIONS)
            async with connection:
                await connection.send(b"sixteen bytes ok")
                assert await connection.recv() == bytes(SIZE)
                assert [message async for message in connection] == []
            output, _ = await server.communicate()
    finally:
        await end(server)
    assert server.returncode == 0, output.decode()
    assert "end 0" in output.decode()


async def test_rdma_client_connects_to_aiordma(any_address: DeviceAddress) -> None:
    async with aiordma.listen(any_address.host, 0, options=OPTIONS) as listener:
        host, port = listener.local_address
        client = await start("rdma_client", "-s", host, "-p", str(port))
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as connection:
                assert await connection.recv() == bytes(SIZE)
                await connection.send(b"sixteen bytes ok")
                assert [message async for message in connection] == []
            output, _ = await asyncio.wait_for(client.communicate(), TIME_LIMIT)
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
    assert "end 0" in output.decode()
