"""Datagrams with the C program udaddy of rdma-core, in both roles.

The client resolves the server at port 7174. It sends ten datagrams of 100 bytes, each with its
queue pair number as immediate data, and waits for ten replies. No datagram is sent again, so none
must be lost.
"""

from __future__ import annotations

import asyncio

import pytest
from helpers import TIME_LIMIT
from programs import end, start, until_accepted

import aiordma
from aiordma import DatagramEndpoint, DatagramPeer
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IB")]

PORT = 7174
COUNT = 10
SIZE = 100


async def resolve_when_it_serves(endpoint: DatagramEndpoint, host: str) -> DatagramPeer:
    """Resolve a server that is still starting."""
    return await until_accepted(lambda: endpoint.resolve(host, PORT), PORT)


async def receive_all(endpoint: DatagramEndpoint) -> list[aiordma.Datagram]:
    """Receive COUNT datagrams of one peer, and check each."""
    datagrams = [await endpoint.recv_from() for _ in range(COUNT)]
    for datagram in datagrams:
        assert len(datagram.data) == SIZE
        assert datagram.imm == datagram.peer.qp_num
        assert datagram.peer == datagrams[0].peer
    return datagrams


async def test_aiordma_sends_to_udaddy(any_address: DeviceAddress) -> None:
    server = await start("udaddy", "-b", any_address.host)
    try:
        async with (
            asyncio.timeout(TIME_LIMIT),
            aiordma.open_datagram((any_address.host, 0)) as endpoint,
        ):
            peer = await resolve_when_it_serves(endpoint, any_address.host)
            for _ in range(COUNT):
                await endpoint.send_to(peer, bytes(SIZE), imm=endpoint.qp_num)
            answers = await receive_all(endpoint)
            assert answers[0].peer == peer
            output, _ = await server.communicate()
    finally:
        await end(server)
    assert server.returncode == 0, output.decode()
    assert "return status 0" in output.decode()


async def test_udaddy_sends_to_aiordma(any_address: DeviceAddress) -> None:
    async with aiordma.open_datagram((any_address.host, PORT)) as endpoint:
        serving = asyncio.create_task(endpoint.serve())
        client = await start("udaddy", "-s", any_address.host, "-b", any_address.host)
        try:
            async with asyncio.timeout(TIME_LIMIT):
                for datagram in await receive_all(endpoint):
                    await endpoint.send_to(datagram.peer, datagram.data, imm=endpoint.qp_num)
                output, _ = await client.communicate()
        finally:
            await end(client)
    await serving
    assert client.returncode == 0, output.decode()
    assert "return status 0" in output.decode()
