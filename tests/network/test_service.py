"""examples/service.py on the other node: each request is done once, whatever ends there."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import loops
import pytest
from helpers import ROOT, TIME_LIMIT
from network_peer import Peer

from aiordma.lab.nodes import Node
from aiordma.lab.remote import RemoteCommand
from aiordma.rdmacm import DeviceAddress
from examples.service_client import Client

PORT = 7481
ROUNDS = 2
REQUESTS = 40


@pytest.fixture
def database() -> Iterator[Path]:
    """Return a file that both nodes see, and that outlives them.

    Each test has another one: a node keeps what it knows of the files of the other node.
    """
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as directory:
        yield Path(directory) / "counters.sqlite"


@pytest.mark.campaign
@pytest.mark.loops("asyncio")
@pytest.mark.may_block
@pytest.mark.parametrize("end", ["power cut", "SIGKILL"])
async def test_each_request_is_done_once(
    peer: Peer, address: DeviceAddress, database: Path, end: str
) -> None:
    """The service ends while it works, twice."""
    host = peer.host(address)
    client = Client(host, PORT)
    running = loops.create_task(client.run())
    totals: list[int] = []
    async with loops.timeout(2 * TIME_LIMIT):
        for number in range(ROUNDS):
            with await loops.to_thread(start_service, peer.node, host, database) as service:
                adding = [loops.create_task(add(client, totals)) for _ in range(REQUESTS)]
                await loops.until(partial(has_more_than, totals, number * REQUESTS), "an answer")
                await loops.to_thread(service.kill if end == "SIGKILL" else peer.power_off)
            await loops.to_thread(peer.mend)
            with await loops.to_thread(start_service, peer.node, host, database) as service:
                await loops.gather(*adding)
                await loops.to_thread(service.kill)
    await loops.cancel(running)
    print(f"connections needed: {client.connections}")
    assert sorted(totals) == [*range(1, ROUNDS * REQUESTS + 1)]


def has_more_than(totals: list[int], count: int) -> bool:
    return len(totals) > count


async def add(client: Client, totals: list[int]) -> None:
    totals.append(await client.add("plums", 1))


def start_service(node: Node, host: str, database: Path) -> RemoteCommand:
    program = ROOT / "examples" / "service.py"
    options = ("--database", str(database), "--monitor", "0")
    service = node.start(sys.executable, str(program), host, str(PORT), *options)
    while not (line := service.read_line(TIME_LIMIT)).startswith("monitor"):
        assert line.startswith("listening"), line
    return service
