"""The examples of each loop: echo pairs talk to each other, and the service ends gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import example_runs
import pytest
from example_runs import finish, interrupt, next_line
from helpers import PATIENCE

import aiordma
from aiordma import PeerClosed, Rejected
from aiordma.rdmacm import DeviceAddress

# What differs between devices is tested elsewhere: one is enough for what differs between loops.
pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IWARP")]


class Running(NamedTuple):
    process: asyncio.subprocess.Process
    where: tuple[str, int]


@asynccontextmanager
async def serving(name: str, address: DeviceAddress, *options: str) -> AsyncIterator[Running]:
    """An example that listens, and where it does."""
    async with example_runs.running(name, address.host, "0", *options) as process:
        line = await next_line(process.stdout)
        assert line.startswith("listening on port "), line
        yield Running(process, (address.host, int(line.split()[-1])))


@pytest.mark.parametrize(
    ("server", "client"),
    [("trio_echo_server", "echo_client"), ("echo_server", "trio_echo_client")],
)
async def test_echo_pairs(address: DeviceAddress, server: str, client: str) -> None:
    """What loop a peer runs on is nobody's business."""
    async with serving(server, address) as (process, (host, port)), asyncio.timeout(PATIENCE):
        done = await example_runs.run(client, host, str(port), "one", "two")
        assert done.status == 0, done.errors
        assert {"echoed: one", "echoed: two"} <= set(done.output.splitlines())
        ended = await interrupt(process)
    assert (ended.status, ended.errors) == (0, "")


async def test_a_trio_client_without_a_server(address: DeviceAddress) -> None:
    async with asyncio.timeout(PATIENCE):
        done = await example_runs.run("trio_echo_client", address.host, "1", "one", "two")
    assert done.status == 1
    assert done.errors.startswith("trio_echo_client: Rejected(")


async def test_sigterm_loses_nothing(address: DeviceAddress) -> None:
    """The answer that is worked on arrives, idle peers are told at once, new ones are refused."""
    async with (
        asyncio.timeout(PATIENCE),
        serving("service", address) as (process, where),
        aiordma.connect(*where) as idle,
        aiordma.connect(*where) as busy,
    ):
        await busy.send(b"work")
        await busy.send(b"more")  # is there when the first is answered, and taken at once
        assert await asyncio.wait_for(busy.recv(), PATIENCE) == hashlib.sha256(b"work").digest()
        process.terminate()
        with pytest.raises(PeerClosed):
            await idle.recv()
        assert await busy.recv() == hashlib.sha256(b"more").digest()
        with pytest.raises(PeerClosed):
            await busy.recv()
        with pytest.raises(Rejected):
            await aiordma.connect(*where)
        ended = await finish(process)
    assert (ended.status, ended.output, ended.errors) == (0, "answered 2 messages\n", "")


@pytest.mark.parametrize("end", ["the grace is over", "a second signal"])
async def test_who_does_not_finish_is_cut_off(address: DeviceAddress, end: str) -> None:
    grace = "0.1" if end == "the grace is over" else "60"
    async with (
        asyncio.timeout(PATIENCE),
        serving("service", address, "--grace", grace, "--work", "3600") as (process, where),
        aiordma.connect(*where) as busy,
    ):
        await busy.send(b"work")
        await asyncio.sleep(0.1)
        process.terminate()
        if end == "a second signal":
            terminating = asyncio.create_task(terminate_until_it_ends(process))
        with pytest.raises((PeerClosed, aiordma.WorkRequestError)):
            await busy.recv()
        if end == "a second signal":
            await terminating
        ended = await finish(process)
    assert (ended.status, ended.errors) == (0, "")


async def terminate_until_it_ends(process: asyncio.subprocess.Process) -> None:
    """Two signals that a process had no time for are one."""
    while process.returncode is None:
        await asyncio.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
