"""The echo examples of aiordma.anyio, with client and server on different backends."""

from __future__ import annotations

import asyncio

import pytest
from example_runs import interrupt, next_line, run, running
from helpers import TIME_LIMIT

from aiordma.rdmacm import DeviceAddress

SERVER, CLIENT = "anyio_echo_server", "anyio_echo_client"

# Other tests cover the differences between devices. One device is enough for the backends.
pytestmark = [pytest.mark.asyncio, pytest.mark.transport("IB")]


@pytest.mark.parametrize(("server", "client"), [("asyncio", "trio"), ("trio", "asyncio")])
async def test_echo_between_backends(address: DeviceAddress, server: str, client: str) -> None:
    """One client is killed, and the next one gets its echoes. Ctrl-C ends the server."""
    async with (
        asyncio.timeout(3 * TIME_LIMIT),
        running(SERVER, "--backend", server, address.host, "0") as process,
    ):
        port = (await next_line(process.stdout)).removeprefix("listening on port ")
        arguments = "--backend", client, address.host, port
        async with running(CLIENT, *arguments, *["x" * 100] * 5000) as killed:
            assert await next_line(killed.stdout) == "echoed: " + "x" * 100
            killed.kill()
        done = await run(CLIENT, *arguments, "grüße", "y" * 5000)
        assert done.output.splitlines() == ["echoed: grüße", "echoed: " + "y" * 5000]
        assert (done.status, done.errors) == (0, "")
        done = await interrupt(process)
        assert (done.status, done.output, done.errors) == (0, "", "")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_the_client_fails_without_a_server(address: DeviceAddress, backend: str) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        done = await run(CLIENT, "--backend", backend, address.host, "1")
    assert done.status == 1
    assert done.errors.startswith("anyio_echo_client: ")
    assert "rejected the connection" in done.errors
