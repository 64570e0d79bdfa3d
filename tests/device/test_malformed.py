"""Seeds of malformed data: short campaigns against servers, and against clients.

tests/soak/test_malformed.py runs long ones, and prints a seed that fails. Add it to SEEDS when the
defect is mended. The attacker is in the same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import machine
import pytest
from attacked import Clients, Servers, failures_of_loop
from hostile_listener import KINDS, open_listeners
from hostile_peer import Attacker

from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.loops("asyncio")

# The simulated devices take a fraction of the time, so they run more seeds.
SEEDS = [1] if machine.simulated is None else list(range(1, 13))
ATTACKS = 10
ROUNDS = 2

Marked = TypeVar("Marked", bound=Callable[..., object])


def on_ib(test: Marked) -> Marked:
    return on("IB", test)


def on_iwarp(test: Marked) -> Marked:
    return on("IWARP", test)


def on(transport: str, test: Marked) -> Marked:
    """Run a test on the devices of a transport, with each of its seeds."""
    marked: Marked = pytest.mark.transport(transport)(test)
    marked = pytest.mark.parametrize("seed", SEEDS)(marked)
    return marked


def is_simulated() -> bool:
    return machine.simulated is not None


@on_ib
async def test_servers_survive(address: DeviceAddress, seed: int) -> None:
    await attack_servers(address, seed)


@on_iwarp
async def test_servers_survive_on_iwarp(address: DeviceAddress, seed: int) -> None:
    await attack_servers(address, seed)


@on_ib
async def test_clients_survive(address: DeviceAddress, seed: int) -> None:
    await attack_clients(address, seed)


@on_iwarp
async def test_clients_survive_on_iwarp(address: DeviceAddress, seed: int) -> None:
    await attack_clients(address, seed)


async def attack_servers(address: DeviceAddress, seed: int) -> None:
    """Attack servers, and then check that they serve others."""
    failures, servers = failures_of_loop(), Servers(address)
    async with servers.running(simulated=is_simulated()):
        attacker = Attacker(seed, servers.targets)
        for _ in range(ATTACKS):
            await attacker.attack()
        assert attacker.connected.total() > ATTACKS / 4
        await servers.check()
    assert not failures


async def attack_clients(address: DeviceAddress, seed: int) -> None:
    """Attack clients of each kind. They get only exceptions that a program expects."""
    failures, clients = failures_of_loop(), Clients(address.host)
    async with AsyncExitStack() as stack:
        is_iwarp = address.transport.name == "IWARP"
        opened = await open_listeners(stack, address.host, seed, is_iwarp=is_iwarp)
        tasks = [asyncio.create_task(each.serve()) for each in opened]
        ports = dict(zip(KINDS, (each.port for each in opened), strict=True))
        visits = sum(
            [await clients.visit_all(ports, simulated=is_simulated()) for _ in range(ROUNDS)]
        )
        assert clients.connected > visits / 4
        await stack.aclose()
        await asyncio.gather(*tasks)
    assert not failures
