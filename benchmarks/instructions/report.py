"""The counts as a table of text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiordma.bench.table import aligned
from benchmarks.instructions.baseline import change, this_build, this_python
from benchmarks.instructions.callgrind import Count
from benchmarks.instructions.cases import CASES

SCHEMA = 1


def as_table(counts: Mapping[str, Count], baseline: Mapping[str, Any]) -> str:
    """Return a line for each case, and a note if the baseline is of another build of Python."""
    head = [f"Python {this_python()}", "instructions", "in aiordma's C", "baseline", "change"]
    rows = [_row(name, count, baseline["counts"].get(name)) for name, count in counts.items()]
    lines = aligned([head, *rows])
    if baseline["counts"] and baseline["build"] != this_build():
        lines.append(f"  the baseline is of another build of Python: {baseline['build']}")
    return "\n".join(lines)


def _row(name: str, count: Count, before: float | None) -> list[str]:
    percent = change(count, before)
    return [
        CASES[name].title,
        f"{count.instructions:,.0f}",
        f"{count.native:,.0f}",
        "-" if before is None else f"{before:,.0f}",
        "-" if percent is None else f"{percent:+.1f} %",
    ]


def as_json(counts: Mapping[str, Count], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report. Its schema is in docs/benchmarks.md."""
    return {
        "schema": SCHEMA,
        "python": this_python(),
        "build": this_build(),
        "cases": {
            name: {
                "instructions": count.instructions,
                "native": count.native,
                "operations": count.operations,
                "baseline": baseline["counts"].get(name),
                "change_percent": change(count, baseline["counts"].get(name)),
            }
            for name, count in counts.items()
        },
    }
