"""Messages with the C programs rdma_xclient and rdma_xserver of rdma-core.

With a reliable connection (-c r) the private data of the server's accept is the queue number 0. The
client sends 16 bytes, and both disconnect.
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
NO_QUEUE = bytes(4)
OPTIONS = ConnectionOptions(max_message_size=SIZE, responder_resources=0, initiator_depth=0)


async def test_aiordma_connects_to_rdma_xserver(address: DeviceAddress) -> None:
    port = await free_port(address)
    server = await start("rdma_xserver", "-p", port, "-c", "r")
    try:
        async with asyncio.timeout(TIME_LIMIT):
            connection = await connect_when_it_listens(address.host, int(port), OPTIONS)
            async with connection:
                assert connection.private_data[:4] == NO_QUEUE
                await connection.send(bytes(SIZE))
            output, _ = await server.communicate()
    finally:
        await end(server)
    assert server.returncode == 0, output.decode()


async def test_rdma_xclient_connects_to_aiordma(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0, options=OPTIONS) as listener:
        host, port = listener.local_address
        client = await start("rdma_xclient", "-s", host, "-p", str(port), "-c", "r")
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept(NO_QUEUE) as connection:
                assert len(await connection.recv()) == SIZE
                assert [message async for message in connection] == []
            output, _ = await asyncio.wait_for(client.communicate(), TIME_LIMIT)
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
