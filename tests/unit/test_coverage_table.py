"""The table of `make coverage`: packages, percentages, floors."""

from __future__ import annotations

import pytest

from benchmarks.coverage_table import packages, table

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
SUMMARIES = {"aiordma/cm/a.py": (80, 80, 20, 20), "aiordma/cm/b.py": (80, 70, 20, 0)}
PYTHON = {
    "files": {
        file: {"summary": dict(zip(COUNTS, numbers, strict=True))}
        for file, numbers in SUMMARIES.items()
    }
}
LINES, BRANCHES = {"line_total": 60, "line_covered": 60}, {"branch_total": 40, "branch_covered": 10}
C = {"files": [{"filename": "aiordma/_native/x.c", **LINES, **BRANCHES}]}


def test_lines_and_branches_of_both_languages_are_added_up() -> None:
    percents = {name: found.percent for name, found in packages(PYTHON, C).items()}
    assert percents == {"aiordma/_native": 70.0, "aiordma/cm": 85.0, "total": 80.0}


@pytest.mark.parametrize(
    ("floors", "low"),
    [
        ({"aiordma/cm": 85, "total": 80}, []),
        ({"aiordma/cm": 86, "total": 80}, ["aiordma/cm"]),
        ({"total": 80.5}, ["total"]),
        ({"aiordma/gone": 1}, ["aiordma/gone"]),
    ],
)
def test_a_package_below_its_floor_is_too_low(floors: dict[str, float], low: list[str]) -> None:
    rows, reached = table(packages(PYTHON, C), floors)
    assert reached == (not low)
    assert [row.split()[0] for row in rows if "too low" in row] == low
