"""The benchmarks, with few rounds: that they work, not how fast anything is."""

from __future__ import annotations

import subprocess
import sys

from helpers import PATIENCE, ROOT

from aiordma.rdmacm import DeviceAddress


def test_streams_side_by_side(address: DeviceAddress) -> None:
    command = [sys.executable, "benchmarks/streams.py", "--quick", "--host", address.host]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [5, 5]
    assert done.stdout.count("1.00 x rstream") >= 2
