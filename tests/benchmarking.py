"""Runs of `aiordma bench --quick`: every implementation finishes; its values do not matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, TIME_LIMIT

from aiordma.bench.implementations import select
from aiordma.bench.plan import Plan
from aiordma.rdmacm import DeviceAddress

# The project's files do not install ucxx-cu12, which is for machines with CUDA.
NOT_INSTALLED = {"ucxx over TCP"}


def run_quickly(plan: Plan, address: DeviceAddress, directory: Path) -> None:
    """Run `aiordma bench` with the choices of a quick plan, and check the report.

    It draws no diagrams: matplotlib first searches for fonts, which takes minutes in the lab.
    """
    report = directory / "report.json"
    command = [sys.executable, "-m", "aiordma", "bench", address.host, "--quick"]
    for option in ("tests", "operations", "loops", "peers"):
        command += [f"--{option}", ",".join(getattr(plan, option))]
    command += ["--json", str(report)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=15 * TIME_LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    missing = found["missing"].keys()
    assert missing <= NOT_INSTALLED
    assert found["machine"]["device"] == address.device
    names = {
        case["key"]: {one["name"] for one in case["implementations"]} for case in found["cases"]
    }
    implementations = select(plan.loops, plan.peers)
    assert names == {
        work.key: {
            one.name for one in implementations if one.supports(work) and one.name not in missing
        }
        for work in plan.works()
    }
    for case in found["cases"]:
        assert case["failures"] == {}
        assert all(
            one["median"] > 0 for one in case["implementations"] if "idle" not in case["key"]
        )
