"""Diagrams: files for the cases that have samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiordma.bench.plan import Work
from aiordma.bench.plot import draw_all
from aiordma.bench.sample import Sample, latency_sample
from aiordma.bench.suite import Case

OURS = {1: latency_sample([3000, 4000, 5000])}
PNG = b"\x89PNG"


def case_of(work: Work, *names: str) -> Case:
    return Case(work, {name: {1: Sample(100.0 * len(name))} for name in names})


def test_each_test_but_idle_has_a_diagram(tmp_path: Path) -> None:
    cases = [
        Case(Work("latency"), {"aiordma asyncio": OURS, "ib_send_lat": {1: Sample(2.0)}}),
        case_of(Work("rate"), "aiordma asyncio", "ib_send_bw"),
        case_of(Work("bandwidth", size=4096), "aiordma asyncio", "ib_send_bw"),
        case_of(Work("bandwidth", size=65536), "aiordma asyncio", "TCP asyncio"),
        case_of(Work("bandwidth", size=4096, operation="read"), "ib_read_bw -e"),
        case_of(Work("connections"), "cmtime"),
        case_of(Work("idle"), "aiordma asyncio"),
    ]
    drawn = draw_all(cases, tmp_path)
    assert [path.name for path in drawn] == [
        "latency-64.png",
        "rate-64.png",
        "connections.png",
        "bandwidth.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


@pytest.mark.parametrize(
    "cases",
    [[], [Case(Work("latency"))], [Case(Work("latency"), {"aiordma asyncio": OURS})]],
    ids=["nothing", "failed", "without-reference"],
)
def test_cases_without_samples_or_reference_are_drawn_without_them(
    cases: list[Case], tmp_path: Path
) -> None:
    assert len(draw_all(cases, tmp_path)) == sum(bool(case.samples) for case in cases)
