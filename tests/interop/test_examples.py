"""The examples run, as a reader of the README would run them."""

from __future__ import annotations

import subprocess
import sys

from helpers import PATIENCE, ROOT

from aiordma.rdmacm import DeviceAddress


def test_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for expected in ("device: ", "echoed: hello", "round trip of 64 bytes: ", "echo was right"):
        assert expected in done.stdout


def test_the_client_fails_without_a_server(address: DeviceAddress) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "echo_client.py"), address.host, "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("echo_client: ")
    assert "rejected the connection" in done.stderr
