"""The echo examples of aiordma.asyncio, and a TCP program under librspreload as the client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from example_runs import interrupt, next_line, run, running
from helpers import TIME_LIMIT
from programs import end

import aiordma
from aiordma.rdmacm import DeviceAddress

SERVER, CLIENT = "stream_echo_server", "stream_echo_client"
PRELOAD = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def serving(address: DeviceAddress) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start the server. Yield its process and its port."""
    async with running(SERVER, address.host, "0") as process:
        line = await next_line(process.stdout)
        assert line.startswith("listening on port "), line
        yield process, line.removeprefix("listening on port ")


async def check_ctrl_c_ends(server: asyncio.subprocess.Process) -> None:
    """Check that Ctrl-C ends the server without an error."""
    done = await interrupt(server)
    assert (done.status, done.output, done.errors) == (0, "", "")


async def test_echo_after_a_client_was_killed(address: DeviceAddress) -> None:
    host = address.host
    async with asyncio.timeout(3 * TIME_LIMIT), serving(address) as (server, port):
        async with running(CLIENT, host, port, *["x" * 100] * 5000) as killed:
            assert await next_line(killed.stdout) == "echoed: " + "x" * 100
            killed.kill()
        done = await run(CLIENT, host, port, "grüße", "y" * 100_000)
        assert done.output.splitlines() == ["echoed: grüße", "echoed: " + "y" * 100_000]
        assert (done.status, done.errors) == (0, "")
        await check_ctrl_c_ends(server)


async def test_ctrl_c_closes_the_streams_of_connected_clients(address: DeviceAddress) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        serving(address) as (server, port),
        aiordma.connect_stream(address.host, int(port)) as idle,
    ):
        await idle.send(b"hello")
        assert await idle.receive() == b"hello"
        await check_ctrl_c_ends(server)
        assert await idle.receive() == b""


async def test_a_tcp_program_as_the_client(address: DeviceAddress) -> None:
    """Run rstream under librspreload, as in docs/streams.md."""
    test = ["-T", "s", "-T", "b", "-T", "v", "-S", "1000", "-C", "10", "-I", "1"]
    async with asyncio.timeout(TIME_LIMIT), serving(address) as (server, port):
        client = await asyncio.create_subprocess_exec(
            *["rstream", "-s", address.host, "-p", port, *test],
            env={**os.environ, "LD_PRELOAD": PRELOAD},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await client.communicate()
        finally:
            await end(client)
        assert client.returncode == 0, output.decode()
        await check_ctrl_c_ends(server)


@pytest.mark.transport("IWARP")  # one device is enough for this
async def test_the_client_fails_without_a_server(address: DeviceAddress) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        done = await run(CLIENT, address.host, "1")
    assert done.status == 1
    assert done.errors.startswith("stream_echo_client: ")
    assert "rejected the connection" in done.errors
