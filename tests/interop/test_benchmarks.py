"""`aiordma bench --quick` on one event loop. tests/soak/test_benchmarks.py runs all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarking import run_quickly

from aiordma.bench.plan import Plan
from aiordma.rdmacm import DeviceAddress


@pytest.mark.transport("IB")
def test_aiordma_and_cmtime_finish_the_tests_of_connections(
    address: DeviceAddress, tmp_path: Path
) -> None:
    tests = ("connections", "idle", "reconnect")
    run_quickly(Plan(tests, loops=("asyncio",), peers=("cmtime",), quick=True), address, tmp_path)
