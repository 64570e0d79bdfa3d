"""`python -m benchmarks.coverage_table`: print the coverage of each package, and check its floor.

It reads what coverage.py and `gcovr --json-summary` have written, coverage.json and gcovr.json, in
the working directory. pyproject.toml has the floors, and the reasons for what is not covered:
[tool.aiordma.coverage].
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TOTAL = "total"


class Coverage(NamedTuple):
    """Lines and branches: their number, and the number of those that were executed."""

    number: int = 0
    covered: int = 0

    def plus(self, number: int, covered: int) -> Coverage:
        return Coverage(self.number + number, self.covered + covered)

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.number if self.number else 100.0


def packages(python: Any, c: Any) -> dict[str, Coverage]:
    """Return the coverage of each package, sorted by name, and of all together."""
    files = [
        (
            name,
            figures["summary"]["num_statements"] + figures["summary"]["num_branches"],
            figures["summary"]["covered_lines"] + figures["summary"]["covered_branches"],
        )
        for name, figures in python["files"].items()
    ]
    files += [
        (
            figures["filename"],
            figures["line_total"] + figures["branch_total"],
            figures["line_covered"] + figures["branch_covered"],
        )
        for figures in c["files"]
    ]
    found: dict[str, Coverage] = {}
    for name, number, covered in files:
        for key in (str(Path(name).parent), TOTAL):
            found[key] = found.get(key, Coverage()).plus(number, covered)
    return dict(sorted(found.items()))


def table(found: Mapping[str, Coverage], floors: Mapping[str, float]) -> tuple[list[str], bool]:
    """Return the rows of the table, and True if every floor is reached."""
    rows, reached = [], True
    for name in sorted(found.keys() | floors.keys()):
        coverage, floor = found.get(name, Coverage(1)), floors.get(name, 0)
        low = coverage.percent < floor
        reached = reached and not low
        missing = coverage.number - coverage.covered
        rows.append(
            f"{name:28}{coverage.number:7}{missing:8}{coverage.percent:8.1f}{floor:7}"
            + "  too low" * low
        )
    return rows, reached


def main() -> None:
    python, c = (json.loads(Path(name).read_text()) for name in ("coverage.json", "gcovr.json"))
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["aiordma"]["coverage"]
    floors = {name: setting["floor"] for name, setting in settings.items()}
    rows, reached = table(packages(python, c), floors)
    print(f"{'lines and branches of':28} number missing percent  floor", *rows, sep="\n")
    for name, setting in settings.items():
        if "missing" in setting:
            print(f"not covered in {name}: {setting['missing']}")
    sys.exit(not reached)


if __name__ == "__main__":
    main()
