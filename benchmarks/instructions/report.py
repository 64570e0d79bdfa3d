"""The counts as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiordma.bench.table import aligned
from benchmarks.instructions.callgrind import Count
from benchmarks.instructions.cases import CASES
from benchmarks.instructions.kept import change, this_build, this_python

SCHEMA = 1


def as_table(counts: Mapping[str, Count], kept: Mapping[str, Any]) -> str:
    """A line for each case, and what is to be known of what was kept."""
    head = [f"Python {this_python()}", "instructions", "in aiordma's C", "kept", "change"]
    rows = [_row(name, count, kept["counts"].get(name)) for name, count in counts.items()]
    lines = aligned([head, *rows])
    if kept["counts"] and kept["build"] != this_build():
        lines.append(f"  kept with another build of Python: {kept['build']}")
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


def as_json(counts: Mapping[str, Count], kept: Mapping[str, Any]) -> dict[str, Any]:
    """All that there is."""
    return {
        "schema": SCHEMA,
        "python": this_python(),
        "build": this_build(),
        "cases": {
            name: {
                "instructions": count.instructions,
                "native": count.native,
                "operations": count.operations,
                "kept": kept["counts"].get(name),
                "change_percent": change(count, kept["counts"].get(name)),
            }
            for name, count in counts.items()
        },
    }
