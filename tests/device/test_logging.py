"""Logging: nothing by default, and the events of connections at level DEBUG."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from helpers import TIME_LIMIT, connected

from aiordma.rdmacm import DeviceAddress

CODE = """
import asyncio, logging, sys
import aiordma

async def main(host):
    async with aiordma.listen(host, 0) as listener:
        serving = asyncio.create_task(listener.serve(echo))
        async with aiordma.connect(*listener.local_address) as connection:
            await connection.send(b"hello")
            assert await connection.recv() == b"hello"
        connecting = asyncio.create_task(aiordma.connect(*listener.local_address))
        await asyncio.sleep(0.001)  # time is the subject: nothing is logged at any moment
        connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled():
            await connecting.result().aclose()
        await listener.aclose()
        await serving
    try:
        await aiordma.connect(host, 1)
    except aiordma.Rejected:
        print("rejected")

async def echo(connection):
    async for message in connection:
        await connection.send(message)

asyncio.run(main(sys.argv[1]))
"""


def test_a_program_prints_no_log_by_default(address: DeviceAddress) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, address.host],
        capture_output=True,
        text=True,
        timeout=2 * TIME_LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "rejected\n", "")


async def test_connections_are_logged_at_debug_level(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "aiordma"):
        async with connected(address) as pair:
            await pair.client.aclose()
            assert [message async for message in pair.server] == []
    logged = "\n".join(caplog.messages)
    assert "CONNECT_REQUEST" in logged
    assert f"connected to {address.host}:" in logged
    assert "connection ended: PeerClosed" in logged
    own = [record for record in caplog.records if record.name.startswith("aiordma")]
    assert not [record for record in own if record.levelno > logging.DEBUG]
