"""Long campaigns, run by `make soak`: one kind of failure for minutes, then a check for leaks.

AIORDMA_SOAK_SECONDS is the duration of each campaign in seconds (default 120). Each campaign prints
figures while it runs.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

import pytest
from campaign import finish, until_time_is_up
from helpers import TIME_LIMIT, read_line, start_python

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SMALL = ConnectionOptions(send_depth=4, recv_depth=4, max_message_size=4096)


async def echo(connection: Connection) -> None:
    """Send each message back."""
    async for message in connection:
        await connection.send(message)


async def run_client(server: tuple[str, int], chance: random.Random, figures: Counter[str]) -> None:
    """Send random messages to an echo server for ever, and check the replies."""
    async with asyncio.timeout(TIME_LIMIT):
        connection = await aiordma.connect(*server, options=SMALL)
    async with connection:
        figures["connected"] += 1
        while True:
            message = chance.randbytes(chance.randrange(4096))
            async with asyncio.timeout(TIME_LIMIT):
                await connection.send(message)
                assert await connection.recv() == message
            figures["echoed"] += 1


async def test_clients_cancelled_at_random_moments(
    address: DeviceAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cancel groups of clients at random moments. The others still receive correct replies."""
    chance = random.Random(1)
    figures: Counter[str] = Counter()
    with capsys.disabled():
        async with aiordma.listen(address.host, 0, options=SMALL) as listener:
            serving = asyncio.create_task(listener.serve(echo))
            for _ in until_time_is_up(f"cancelled on {address.device}", figures):
                server = listener.local_address
                tasks = [asyncio.create_task(run_client(server, chance, figures)) for _ in range(8)]
                for task in tasks:
                    await asyncio.sleep(chance.uniform(0, 0.1))
                    task.cancel()
                    figures["cancelled"] += 1
                await finish(tasks)
                assert all(task.cancelled() for task in tasks), [
                    t for t in tasks if not t.cancelled()
                ]
            async with asyncio.timeout(TIME_LIMIT):
                await listener.aclose()
                await serving
    assert figures["echoed"]


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


async def test_peers_killed_at_random_moments(
    address: DeviceAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill peer processes while they start, connect and send. The server keeps working."""
    chance = random.Random(2)
    figures: Counter[str] = Counter()

    async def count(connection: Connection) -> None:
        figures["connected"] += 1
        async for message in connection:
            figures["messages"] += 1
            await connection.send(message)

    with capsys.disabled():
        async with aiordma.listen(address.host, 0) as listener:
            serving = asyncio.create_task(listener.serve(count))
            host, port = listener.local_address
            for _ in until_time_is_up(f"killed on {address.device}", figures):
                peer = start_python(SENDER, host, str(port))
                if chance.random() < 0.7:
                    assert await asyncio.to_thread(read_line, peer) == "connected"
                    await asyncio.sleep(chance.uniform(0, 0.5))
                else:
                    await asyncio.sleep(chance.uniform(0, 4))
                peer.send_signal(signal.SIGKILL)
                await asyncio.to_thread(peer.communicate)
                figures["killed"] += 1
            await listener.aclose()
            async with asyncio.timeout(TIME_LIMIT):
                await serving
    assert figures["messages"]
