"""`aiordma bench --quick` on one event loop. tests/soak/test_benchmarks.py runs all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarking import run_quickly

from aiordma.bench.plan import Plan
from aiordma.rdmacm import DeviceAddress


@pytest.mark.transport("IB")
def test_aiordma_and_cmtime_set_up_connections(address: DeviceAddress, tmp_path: Path) -> None:
    plan = Plan(("connections",), loops=("asyncio",), peers=("cmtime",), quick=True)
    run_quickly(plan, address, tmp_path)
