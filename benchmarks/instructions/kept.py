"""Counts that are kept, to tell what a change has changed."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.instructions.callgrind import Count

KEPT = Path(__file__).with_name("kept.json")


def this_python() -> str:
    """What counts are kept for: "3.11 x86_64"."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"


def this_build() -> str:
    """Which Python of that version it is: another one is other machine code."""
    return f"{platform.python_version()}, {' '.join(platform.python_build())}, " + (
        platform.python_compiler()
    )


def load(path: Path = KEPT) -> dict[str, Any]:
    """What is kept for this version of Python; nothing if there is nothing."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return dict(found.get(this_python(), {"build": "", "counts": {}}))


def save(counts: Mapping[str, Count], path: Path = KEPT) -> None:
    """Keep these counts from now on, beside those of other cases."""
    every: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    mine = load(path)["counts"]
    mine |= {name: round(count.instructions, 1) for name, count in counts.items()}
    every[this_python()] = {"build": this_build(), "counts": mine}
    path.write_text(json.dumps(every, indent=4, sort_keys=True) + "\n")


def change(count: Count, before: float | None) -> float | None:
    """By how many percent it is more than what was kept, if anything was."""
    return None if not before else 100 * (count.instructions / before - 1)
