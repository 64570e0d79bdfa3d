"""The baseline: counts stored in baseline.json, with which later counts are compared."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.instructions.callgrind import Count

BASELINE = Path(__file__).with_name("baseline.json")


def this_python() -> str:
    """Return the key of the baseline of this Python: "3.11 x86_64"."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"


def this_build() -> str:
    """Return the build of this Python. Another build of the same version is other machine code."""
    return f"{platform.python_version()}, {' '.join(platform.python_build())}, " + (
        platform.python_compiler()
    )


def load(path: Path = BASELINE) -> dict[str, Any]:
    """Return the baseline of this version of Python. Without one its counts are empty."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return dict(found.get(this_python(), {"build": "", "counts": {}}))


def save(counts: Mapping[str, Count], path: Path = BASELINE) -> None:
    """Store these counts in the baseline. Counts of other cases by this build stay in it."""
    every: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stored = load(path)
    mine = stored["counts"] if stored["build"] == this_build() else {}
    mine |= {name: round(count.instructions, 1) for name, count in counts.items()}
    every[this_python()] = {"build": this_build(), "counts": mine}
    path.write_text(json.dumps(every, indent=4, sort_keys=True) + "\n")


def change(count: Count, before: float | None) -> float | None:
    """Return the change since the baseline in percent; None if the baseline has no count."""
    return None if not before else 100 * (count.instructions / before - 1)
