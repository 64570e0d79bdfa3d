"""Draw how the costs grow with the number of connections: docs/performance/scale.png.

python -m benchmarks.plot_scale REPORT...

Each report is of `aiordma bench --tests idle,answering,reconnect --idle N --json FILE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aiordma.bench.report import read_reports
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case

DRAWN = Path(__file__).resolve().parents[1] / "docs" / "performance" / "scale.png"
Point = tuple[int, float]


def points(cases: Iterable[Case], key: str, value: Callable[[Sample], float]) -> list[Point]:
    """Return the number of connections and the median value of each case with this key."""
    return sorted(
        (case.work.idle, median(map(value, samples.values())))
        for case in cases
        if case.work.key == key
        for samples in case.samples.values()
    )


def draw(cases: list[Case]) -> Figure:
    """Return the figure: memory, latency among others, and the rate of reconnecting."""
    figure = Figure(figsize=(7, 7.5), layout="constrained")
    memory, latency, rate = figure.subplots(3, 1, sharex=True)
    for key, label in (("idle", "connections"), ("idle/streams", "byte streams")):
        _plot(memory, points(cases, key, lambda sample: sample.value), label)
    memory.set_ylabel("KiB each")
    for key, label in (
        ("idle", "idle connections"),
        ("idle/streams", "idle byte streams"),
        ("answering", "connections that answer in 30 s"),
    ):
        _plot(latency, points(cases, key, lambda sample: sample.details["latency_ratio"]), label)
    latency.set_ylabel("round trip among them\nx alone")
    _plot(rate, points(cases, "reconnect", lambda sample: sample.value), "clients that reconnect")
    rate.set_ylabel("served again, each second")
    rate.set_xlabel("connections")
    rate.set_xscale("log")
    for axes in (memory, latency, rate):
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plot(axes: Axes, found: list[Point], label: str) -> None:
    axes.plot(*zip(*found, strict=True), marker="o", label=label)


def main() -> None:
    """Draw the reports on the command line."""
    cases = [case for name in sys.argv[1:] for case in read_reports([Path(name)]).cases]
    draw(cases).savefig(DRAWN, dpi=100)
    print(DRAWN)


if __name__ == "__main__":
    main()
