"""Messages with the C program ucmatose of rdma-core, in both roles.

The server sends ten messages of 100 bytes first. The client replies with ten, and the server then
disconnects. On iWARP the accepting side cannot send first.
"""

from __future__ import annotations

import asyncio

import pytest
from helpers import TIME_LIMIT
from programs import connect_when_it_listens, end, free_port, start

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IB")]

MESSAGES = 10
SIZE = 100
OPTIONS = ConnectionOptions(max_message_size=SIZE, responder_resources=1, initiator_depth=1)


@pytest.mark.parametrize("migrate", [[], ["-m"]], ids=["stays", "migrates"])
async def test_aiordma_connects_to_ucmatose(any_address: DeviceAddress, migrate: list[str]) -> None:
    port = await free_port(any_address)
    server = await start("ucmatose", "-b", any_address.host, "-p", port, *migrate)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            connection = await connect_when_it_listens(any_address.host, int(port), OPTIONS)
            async with connection:
                for _ in range(MESSAGES):
                    assert len(await connection.recv()) == SIZE
                for _ in range(MESSAGES):
                    await connection.send(bytes(SIZE))
                assert [message async for message in connection] == []
            output, _ = await server.communicate()
    finally:
        await end(server)
    assert server.returncode == 0, output.decode()
    assert "return status 0" in output.decode()


@pytest.mark.parametrize("port_space", ["tcp", "ib"])
async def test_ucmatose_connects_to_aiordma(any_address: DeviceAddress, port_space: str) -> None:
    space = aiordma.PortSpace[port_space.upper()]
    options = ConnectionOptions(max_message_size=SIZE, port_space=space)
    async with aiordma.listen(any_address.host, 0, options=options) as listener:
        host, port = listener.local_address
        client = await start("ucmatose", "-s", host, "-p", str(port), "-P", port_space)
        try:
            async with asyncio.timeout(TIME_LIMIT), await listener.accept() as connection:
                for number in range(MESSAGES):
                    await connection.send(bytes([number]) * SIZE)
                for _ in range(MESSAGES):
                    assert len(await connection.recv()) == SIZE
            output, _ = await asyncio.wait_for(client.communicate(), TIME_LIMIT)
        finally:
            await end(client)
    assert client.returncode == 0, output.decode()
    assert "return status 0" in output.decode()
