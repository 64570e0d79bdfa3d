"""Long campaigns, run by `make soak`: one kind of failure for minutes, then a check for leaks.

AIORDMA_SOAK_SECONDS is the duration of each campaign in seconds (default 120). Each campaign prints
figures while it runs.
"""

from __future__ import annotations

import asyncio

import pytest
from campaign import Campaign, finish
from helpers import TIME_LIMIT, end, read_line, start_python

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SMALL = ConnectionOptions(send_depth=4, recv_depth=4, max_message_size=4096)


async def echo(connection: Connection) -> None:
    """Send each message back."""
    async for message in connection:
        await connection.send(message)


async def run_client(server: tuple[str, int], campaign: Campaign) -> None:
    """Send random messages to an echo server for ever, and check the replies."""
    async with asyncio.timeout(TIME_LIMIT):
        connection = await aiordma.connect(*server, options=SMALL)
    async with connection:
        campaign.figures["connected"] += 1
        while True:
            message = campaign.chance.randbytes(campaign.chance.randrange(4096))
            async with asyncio.timeout(TIME_LIMIT):
                await connection.send(message)
                assert await connection.recv() == message
            campaign.figures["echoed"] += 1


async def test_clients_cancelled_at_random_moments(
    address: DeviceAddress, campaign: Campaign
) -> None:
    """Cancel groups of clients at random moments. The others still receive correct replies."""
    async with aiordma.listen(address.host, 0, options=SMALL) as listener:
        serving = asyncio.create_task(listener.serve(echo))
        server = listener.local_address
        for _ in campaign.rounds():
            tasks = [asyncio.create_task(run_client(server, campaign)) for _ in range(8)]
            for task in tasks:
                await asyncio.sleep(campaign.chance.uniform(0, 0.1))
                task.cancel()
                campaign.figures["cancelled"] += 1
            await finish(tasks)
            assert [task for task in tasks if not task.cancelled()] == []
        async with asyncio.timeout(TIME_LIMIT):
            await listener.aclose()
            await serving
    assert campaign.figures["echoed"]


SENDER = """
import asyncio, sys
import aiordma

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        print("connected", flush=True)
        while True:
            await connection.send(b"x" * 2000)
            await connection.recv()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_peers_killed_at_random_moments(address: DeviceAddress, campaign: Campaign) -> None:
    """Kill peer processes while they start, connect and send. The server keeps working."""

    async def count(connection: Connection) -> None:
        campaign.figures["connected"] += 1
        async for message in connection:
            campaign.figures["messages"] += 1
            await connection.send(message)

    async with aiordma.listen(address.host, 0) as listener:
        serving = asyncio.create_task(listener.serve(count))
        host, port = listener.local_address
        for _ in campaign.rounds():
            peer = start_python(SENDER, host, str(port))
            if campaign.chance.random() < 0.7:
                assert await asyncio.to_thread(read_line, peer) == "connected"
                await asyncio.sleep(campaign.chance.uniform(0, 0.5))
            else:
                await asyncio.sleep(campaign.chance.uniform(0, 4))
            await end(peer)
        await listener.aclose()
        async with asyncio.timeout(TIME_LIMIT):
            await serving
    assert campaign.figures["messages"]
