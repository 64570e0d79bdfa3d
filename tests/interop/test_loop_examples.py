"""The examples of each event loop: echoes between two loops, and the graceful service."""

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
from helpers import TIME_LIMIT

import aiordma
from aiordma import PeerClosed, Rejected
from aiordma.rdmacm import DeviceAddress

# Other tests cover the differences between devices. One device is enough for the event loops.
pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IWARP")]


class Server(NamedTuple):
    """The process of a server, and its address."""

    process: asyncio.subprocess.Process
    address: tuple[str, int]


@asynccontextmanager
async def serving(name: str, address: DeviceAddress, *options: str) -> AsyncIterator[Server]:
    """Start an example that listens. Yield its process and its address."""
    async with example_runs.running(name, address.host, "0", *options) as process:
        line = await next_line(process.stdout)
        assert line.startswith("listening on port "), line
        yield Server(process, (address.host, int(line.split()[-1])))


@pytest.mark.parametrize(
    ("server", "client"),
    [("trio_echo_server", "echo_client"), ("echo_server", "trio_echo_client")],
)
async def test_echo_between_loops(address: DeviceAddress, server: str, client: str) -> None:
    """A peer on another event loop makes no difference."""
    async with serving(server, address) as (process, (host, port)), asyncio.timeout(TIME_LIMIT):
        done = await example_runs.run(client, host, str(port), "one", "two")
        assert done.status == 0, done.errors
        assert {"echoed: one", "echoed: two"} <= set(done.output.splitlines())
        ended = await interrupt(process)
    assert (ended.status, ended.errors) == (0, "")


async def test_the_trio_client_fails_without_a_server(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        done = await example_runs.run("trio_echo_client", address.host, "1", "one", "two")
    assert done.status == 1
    assert done.errors.startswith("trio_echo_client: Rejected(")


async def test_sigterm_loses_no_answer(address: DeviceAddress) -> None:
    """The answer in progress arrives, idle connections are closed, new peers are rejected."""
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving("service", address) as (process, server),
        aiordma.connect(*server) as idle,
        aiordma.connect(*server) as busy,
    ):
        await busy.send(b"work")
        await busy.send(b"more")  # received as soon as the first is answered
        assert await asyncio.wait_for(busy.recv(), TIME_LIMIT) == hashlib.sha256(b"work").digest()
        process.terminate()
        with pytest.raises(PeerClosed):
            await idle.recv()
        assert await busy.recv() == hashlib.sha256(b"more").digest()
        with pytest.raises(PeerClosed):
            await busy.recv()
        with pytest.raises(Rejected):
            await aiordma.connect(*server)
        ended = await finish(process)
    assert (ended.status, ended.output, ended.errors) == (0, "answered 2 messages\n", "")


@pytest.mark.parametrize("end", ["the grace period ends", "a second signal"])
async def test_an_unfinished_answer_is_cancelled(address: DeviceAddress, end: str) -> None:
    grace = "0.1" if end == "the grace period ends" else "3600"
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving("service", address, "--grace", grace, "--work", "3600") as (process, server),
        aiordma.connect(*server) as busy,
    ):
        await busy.send(b"work")
        # The service has taken the message before it accepts a later peer.
        await (await aiordma.connect(*server)).aclose()
        process.terminate()
        if end == "a second signal":
            await wait_until_rejected(server)  # the first one is handled
            process.terminate()
        with pytest.raises((PeerClosed, aiordma.WorkRequestError)):
            await busy.recv()
        ended = await finish(process)
    assert (ended.status, ended.errors) == (0, "")


async def wait_until_rejected(server: tuple[str, int]) -> None:
    """Connect to a service until it stops listening."""
    with contextlib.suppress(Rejected):
        while True:
            await (await aiordma.connect(*server)).aclose()
