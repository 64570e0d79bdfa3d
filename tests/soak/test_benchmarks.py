"""`aiordma bench --quick`: every implementation in every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarking import run_quickly

from aiordma.bench.plan import Plan
from aiordma.rdmacm import DeviceAddress


@pytest.mark.transport("IB")
def test_every_implementation_finishes(address: DeviceAddress, tmp_path: Path) -> None:
    run_quickly(Plan(quick=True), address, tmp_path)
