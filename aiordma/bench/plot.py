"""Diagrams of the results. Imported only for `--plot`, because matplotlib is optional."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from aiordma.bench.implementations import reference
from aiordma.bench.plan import TESTS
from aiordma.bench.suite import Case

# Okabe and Ito's colours, which colour-blind readers can distinguish, too.
OURS, OTHERS, REFERENCE, INK = "#0072B2", "#B8B8B8", "#E69F00", "#333333"
OUR_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
OTHER_LINES = ("#000000", "#7F7F7F", "#8C564B", "#6A3D9A", "#17A2B8")
POINTS = "osD^v"
MARKS = {"50": "o", "90": "s", "99": "D", "99.9": "^"}
DPI = 120


def draw_all(cases: Sequence[Case], directory: Path) -> list[Path]:
    """Draw the diagrams of the cases that have samples; return their files.

    Raises:
        OSError: a file cannot be written.
    """
    mpl.use("Agg")
    drawn = []
    for name, figure in _figures([case for case in cases if case.samples]):
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=DPI)
        drawn.append(path)
    return drawn


def _figures(cases: list[Case]) -> Iterator[tuple[str, Figure]]:
    for case in cases:
        name = case.work.key.replace("/", "-")
        if case.work.test == "latency":
            yield name, _latency(case)
        elif case.work.test in ("rate", "connections"):
            yield name, _bars(case)
    bandwidth = [case for case in cases if case.work.test == "bandwidth"]
    if bandwidth:
        yield "bandwidth", _bandwidth(bandwidth)


def _bar_figure(rows: int) -> tuple[Figure, Axes]:
    """Return a figure of the height that this number of bars needs, and its axes."""
    figure = Figure(figsize=(9, 1.6 + 0.36 * rows), layout="constrained")
    axes = figure.subplots()
    assert isinstance(axes, Axes)
    _style_axes(axes)
    return figure, axes


def _style_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)


def _colour(case: Case, name: str) -> str:
    if name == reference(case.work):
        return REFERENCE
    return OURS if name.startswith("aiordma") else OTHERS


def _ordered(case: Case) -> list[str]:
    """Return the implementations, the best one last: its bar is on top."""
    values = {name: case.value(name) or 0.0 for name in case.samples}
    return sorted(values, key=lambda name: values[name], reverse=_is_lower_better(case))


def _is_lower_better(case: Case) -> bool:
    return TESTS[case.work.test].lower_is_better


def _latency(case: Case) -> Figure:
    """Return a bar chart of medians, as ratios to the reference, with marks at percentiles."""
    names = _ordered(case)
    base = case.value(reference(case.work))
    unit = base or 1.0
    figure, axes = _bar_figure(len(names) + 1)
    widths = [(case.value(name) or 0.0) / unit for name in names]
    axes.barh(names, widths, color=[_colour(case, name) for name in names], height=0.62)
    for percentile, mark in MARKS.items():
        points = [(_percentile(case, name, percentile), name) for name in names]
        known = [(value / unit, name) for value, name in points if value is not None]
        if known:
            values, rows = zip(*known, strict=True)
            axes.plot(values, rows, mark, color=INK, markersize=4.5, label=f"p{percentile}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlim(left=min(0.5, *widths) if base else min(widths) / 2)
    if base:
        axes.axvline(1.0, color=REFERENCE, linewidth=1.2)
        axes.set_xlabel(f"ratio to the median of {reference(case.work)} ({base:.1f} us), log scale")
    else:
        axes.set_xlabel("us, log scale")
    axes.set_title(f"Latency: {case.work.title.partition(': ')[2]}, lower is better", loc="left")
    figure.legend(loc="outside lower center", ncols=len(MARKS), frameon=False)
    return figure


def _percentile(case: Case, name: str, percentile: str) -> float | None:
    found = [
        sample.percentiles[percentile]
        for sample in case.samples[name].values()
        if percentile in sample.percentiles
    ]
    return median(found) if found else None


def _bars(case: Case) -> Figure:
    """Return a bar chart of the values, each printed beside its bar."""
    names = _ordered(case)
    figure, axes = _bar_figure(len(names))
    values = [case.value(name) or 0.0 for name in names]
    bars = axes.barh(names, values, color=[_colour(case, name) for name in names], height=0.62)
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=4, color=INK)
    axes.margins(x=0.12)
    axes.set_xlabel(TESTS[case.work.test].unit)
    axes.set_title(f"{case.work.title.capitalize()}, higher is better", loc="left")
    return figure


def _bandwidth(cases: list[Case]) -> Figure:
    """Return line charts of MB/s over sizes, one chart for each operation."""
    operations = list(dict.fromkeys(case.work.operation for case in cases))
    figure = Figure(figsize=(1.5 + 4.6 * len(operations), 5.6), layout="constrained")
    styles = _styles(cases)
    for number, operation in enumerate(operations, 1):
        axes = figure.add_subplot(1, len(operations), number)
        _style_axes(axes)
        _draw_lines(axes, [case for case in cases if case.work.operation == operation], styles)
        axes.set_title(f"Bandwidth: {operation}", loc="left")
        axes.set_xlabel("bytes of each operation")
    figure.axes[0].set_ylabel("MB/s, higher is better")
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def _label(name: str) -> str:
    """Return the name in the legend. All of perftest's programs have the same one."""
    return f"perftest{name.partition('_bw')[2]}" if name.startswith("ib_") else name


def _styles(cases: list[Case]) -> dict[str, tuple[str, str]]:
    """Return a line format and a colour for each label: solid for aiordma, dashed for others."""
    labels = list(dict.fromkeys(_label(name) for case in cases for name in case.samples))
    styles = {}
    for line, colours in (("-", OUR_LINES), ("--", OTHER_LINES)):
        group = [label for label in labels if label.startswith("aiordma") == (line == "-")]
        for label, point, colour in zip(group, cycle(POINTS), cycle(colours), strict=False):
            styles[label] = (f"{point}{line}", colour)
    return styles


def _fill_colour(name: str) -> str | None:
    """Return the colour inside of points: those of aiordma are filled, the others hollow."""
    return None if name.startswith("aiordma") else "white"


def _draw_lines(axes: Axes, cases: list[Case], styles: dict[str, tuple[str, str]]) -> None:
    sizes = sorted(case.work.size for case in cases)
    by_size = {case.work.size: case for case in cases}
    for name in dict.fromkeys(name for case in cases for name in case.samples):
        points = [(size, by_size[size].value(name)) for size in sizes]
        known = [(size, value) for size, value in points if value is not None]
        style, colour = styles[_label(name)]
        axes.plot(
            *zip(*known, strict=True),
            style,
            color=colour,
            markerfacecolor=_fill_colour(name),
            label=_label(name),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
