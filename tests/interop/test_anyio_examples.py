"""The echo examples through aiordma.anyio: on each back end, and with one at each end."""

from __future__ import annotations

import asyncio
import signal

import pytest
from example_runs import finish, next_line, run, running
from helpers import PATIENCE

from aiordma.rdmacm import DeviceAddress

SERVER, CLIENT = "anyio_echo_server", "anyio_echo_client"
BACKENDS = ["asyncio", "trio"]

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("client", BACKENDS)
@pytest.mark.parametrize("server", BACKENDS)
async def test_an_echo(address: DeviceAddress, server: str, client: str) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE),
        running(SERVER, "--backend", server, address.host, "0") as serving,
    ):
        port = (await next_line(serving.stdout)).removeprefix("listening on port ")
        for messages in ([], ["grüße", "x" * 5000]):
            done = await run(CLIENT, "--backend", client, address.host, port, *messages)
            expected = messages or ["hello", "over", "RDMA"]
            assert done.output.splitlines() == [f"echoed: {message}" for message in expected]
            assert (done.status, done.errors) == (0, "")
        serving.send_signal(signal.SIGINT)
        done = await finish(serving)
        assert (done.status, done.output, done.errors) == (0, "", "")


@pytest.mark.parametrize("server", BACKENDS)
async def test_the_server_outlives_a_client_that_is_killed(
    address: DeviceAddress, server: str
) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE),
        running(SERVER, "--backend", server, address.host, "0") as serving,
    ):
        port = (await next_line(serving.stdout)).removeprefix("listening on port ")
        endless = ["x" * 100] * 5000
        async with running(CLIENT, address.host, port, *endless) as client:
            assert await next_line(client.stdout)
            client.kill()
        done = await run(CLIENT, address.host, port, "still there")
        assert done.output == "echoed: still there\n"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_client_fails_without_a_server(address: DeviceAddress, backend: str) -> None:
    async with asyncio.timeout(PATIENCE):
        done = await run(CLIENT, "--backend", backend, address.host, "1")
    assert done.status == 1
    assert done.errors.startswith("anyio_echo_client: ")
    assert "rejected the connection" in done.errors
