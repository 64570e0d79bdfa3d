"""Peers that send random private data, messages, immediate data, announcements and iWARP frames.

In each round, a process attacks servers of messages, byte streams, pings and datagrams, those of
asyncio, anyio and trio as well. Another process listens, and attacks clients of each kind. After
that a well-behaved peer of each server must be served. The random choices of a round come
from its seed, which is printed if the round fails. At the end, most attacks have been accepted, the
log has at most one record for each LOG_SECONDS, and the process has not grown.

AIORDMA_SOAK_FUZZ_SECONDS is the time on each device (default 300). AIORDMA_SOAK_FUZZ_SEED repeats
the round of a seed, without the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hostile_peer
import pytest
from attacked import Clients, Servers, failures_of_loop
from helpers import TIME_LIMIT, end, read_line, start_python

from aiordma.cm.occasional_log import LOG_SECONDS
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SECONDS = float(os.environ.get("AIORDMA_SOAK_FUZZ_SECONDS", "300"))
SEED = os.environ.get("AIORDMA_SOAK_FUZZ_SEED")
ATTACKS_IN_A_ROUND = 60
VISITS_IN_A_ROUND = 3
# Of the process while it is attacked, after the first rounds.
MAX_GROWTH = 64 << 20
GROWTH_STARTS_AFTER = 4

TESTS = Path(__file__).parent.parent

PROGRAM = """
import asyncio, importlib, sys
sys.path.insert(0, sys.argv.pop(1))
module = importlib.import_module(sys.argv.pop(1))
asyncio.run(module.main(*sys.argv[1:]))
"""


def resident_bytes() -> int:
    """Return the size of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Run main() of a module of the tests in a process."""
    return start_python(PROGRAM, str(TESTS), module, *arguments)


async def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process, which is in time."""
    async with asyncio.timeout(10 * TIME_LIMIT):
        line = await asyncio.to_thread(read_line, process)
    assert line, "the attacker ended early"
    return line


class Campaign:
    """Rounds of attacks on the servers of a device, and on clients at the same time."""

    def __init__(self, address: DeviceAddress) -> None:
        self._failures: Sequence[str] = failures_of_loop()
        self.servers = Servers(address)
        self.clients = Clients(address.host)
        self.attacks: Counter[str] = Counter()
        self.connected: Counter[str] = Counter()
        self.checks = self.visits = 0

    async def round(self, seed: int) -> None:
        """Attack the servers and the clients, and check that the servers serve others.

        Raises:
            AssertionError: the round has failed. The message has its seed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._attack_servers(seed))
                tasks.create_task(self._attack_clients(seed))
            await self.servers.check()
            self.checks += 1
            assert not self._failures, self._failures
        except Exception as error:
            raise AssertionError(f"AIORDMA_SOAK_FUZZ_SEED={seed} repeats it") from error

    async def _attack_servers(self, seed: int) -> None:
        arguments = hostile_peer.arguments_of(seed, ATTACKS_IN_A_ROUND, self.servers.targets)
        process = start("hostile_peer", *arguments)
        attacks, connected = json.loads(await line_of(process))
        await end(process)
        self.attacks.update(attacks)
        self.connected.update(connected)

    async def _attack_clients(self, seed: int) -> None:
        servers = self.servers
        process = start("hostile_listener", str(seed), servers.host, str(servers.is_iwarp))
        ports = json.loads(await line_of(process))
        for _ in range(VISITS_IN_A_ROUND):
            self.visits += await self.clients.visit_all(ports)
        await end(process)

    @property
    def accepted(self) -> int:
        """The number of attacks that the servers have accepted, by the counts of the listeners."""
        targets = self.servers.targets
        own = len(targets.messages) + len(targets.streams) + len(targets.pings)
        return self.servers.accepted - self.checks * own


async def test_malformed_data_of_every_kind(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    first = random.randrange(1 << 32) if SEED is None else int(SEED)
    campaign, rounds, size = Campaign(address), 0, 0
    async with campaign.servers.running():
        begin = time.monotonic()
        while rounds == 0 or (SEED is None and time.monotonic() - begin < SECONDS):
            await campaign.round(first + rounds)
            rounds += 1
            if rounds <= GROWTH_STARTS_AFTER:
                size = resident_bytes()
        grown, seconds = resident_bytes() - size, time.monotonic() - begin
        accepted = campaign.accepted
    messages = Counter(f"{one.levelname} {one.getMessage()}" for one in caplog.records)
    attacks = campaign.attacks.total()
    visits, connected = campaign.visits, campaign.clients.connected
    with capsys.disabled():
        print(
            f"\n{address.device}: seeds {first} to {first + rounds - 1} in {seconds:.0f} s\n"
            f"{attacks} attacks on servers, which accepted {accepted}: "
            f"{dict(campaign.attacks)}, accepted {dict(campaign.connected)}\n"
            f"{visits} clients attacked, of which {connected} had connected\n"
            f"{grown >> 20} MiB grown; records: {dict(messages)}"
        )
    assert messages.total() <= seconds / LOG_SECONDS + 1
    assert grown < MAX_GROWTH
    assert connected > visits / 4
    if SEED is None:  # one round need not have attacks of each kind
        assert accepted > attacks / 4
        assert campaign.connected.keys() == campaign.attacks.keys()
