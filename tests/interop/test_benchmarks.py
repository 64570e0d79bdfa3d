"""The benchmarks, with few rounds: that they work, not how fast anything is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT

from aiordma.rdmacm import DeviceAddress


@pytest.mark.transport("IB")
def test_streams_side_by_side(address: DeviceAddress) -> None:
    command = [sys.executable, "benchmarks/streams.py", "--quick", "--host", address.host]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 5
    assert "1.00 x rstream" in done.stdout
