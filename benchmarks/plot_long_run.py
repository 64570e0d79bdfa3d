"""Draw what `make long-run` has measured: docs/reliability/NAME.png of build/long-run/NAME.json.

python -m benchmarks.plot_long_run [NAME...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
MEASURED, DRAWN = ROOT / "build" / "long-run", ROOT / "docs" / "reliability"


def draw(name: str, content: dict[str, Any]) -> Path:
    """Draw the memory, the descriptors and the RDMA objects over time. Return the file."""
    samples = content["samples"]
    seconds = [one["seconds"] for one in samples]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    memory, counts = figure.subplots(2, 1, sharex=True)
    mebibytes = [one["memory"] / 2**20 for one in samples]
    memory.plot(seconds, mebibytes, color="C0")
    memory.set_ylabel("memory in MiB")
    memory.set_ylim(0, 1.2 * max(mebibytes))
    memory.set_title(f"{samples[-1]['done']:,} {content['unit']}")
    counts.plot(seconds, [one["files"] for one in samples], color="C1", label="descriptors")
    counts.plot(seconds, [one["objects"] for one in samples], color="C2", label="RDMA objects")
    counts.set_ylim(0, 1.2 * max(max(one["files"], one["objects"]) for one in samples))
    counts.set_xlabel("seconds")
    counts.legend()
    for axes in (memory, counts):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = DRAWN / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def main() -> None:
    names = sys.argv[1:] or [path.stem for path in sorted(MEASURED.glob("*.json"))]
    for name in names:
        print(draw(name, json.loads((MEASURED / f"{name}.json").read_text())))


if __name__ == "__main__":
    main()
