"""The examples, run as a reader of the README runs them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import ROOT, TIME_LIMIT, start_python

from aiordma.rdmacm import DeviceAddress

# Starting Python takes long in the lab, and other tests cover the differences between devices.
ONE_DEVICE = pytest.mark.transport("IB")


@ONE_DEVICE
def test_the_demo_echoes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=2 * TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for expected in ("device: ", "echoed: hello", "round trip of 64 bytes: ", "echo was right"):
        assert expected in done.stdout


@ONE_DEVICE
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("async_id", ["device: ", "received: hello from an asynchronous id", "DISCONNECTED"]),
        ("sync_id", ["no request yet", "accepted with: welcome", "hello from a synchronous id"]),
        ("endpoint", ["received: hello from an endpoint"]),
        ("migration", ["a request that a thread waited for", "that the event loop waited for"]),
    ],
)
def test_the_examples_of_each_kind_of_id(
    name: str, expected: list[str], address: DeviceAddress
) -> None:
    """Asynchronous ids, synchronous ids, endpoints, and ids that migrate."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), address.host],
        capture_output=True,
        text=True,
        timeout=2 * TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout


@ONE_DEVICE
def test_the_client_fails_without_a_server(address: DeviceAddress) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "echo_client.py"), address.host, "1"],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("echo_client: ")
    assert "rejected the connection" in done.stderr


def test_the_programs_of_the_readme(address: DeviceAddress) -> None:
    """Run the client and the server of the README, with another address and another port."""
    client, server = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    port = "7489"
    announce = "        print('listening', flush=True)\n        await listener.serve(echo)"
    server = server.replace("        await listener.serve(echo)", announce)
    server = f"import asyncio, aiordma\n{server}\nasyncio.run(main())".replace("7471", port)
    client = client.replace("10.7.1.1", address.host).replace("7471", port)
    server_process = start_python(server)
    try:
        assert server_process.stdout is not None
        assert server_process.stdout.readline() == "listening\n"
        output, _ = start_python(client).communicate(timeout=TIME_LIMIT)
    finally:
        server_process.kill()
        server_process.communicate()
    assert output == "b'hello'\n"
