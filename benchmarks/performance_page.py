"""Put the tables of the benchmark's reports into docs/performance.md, and draw its diagrams.

python -m benchmarks.performance_page

A table stands between a comment that names the case of a report, and the comment END.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from aiordma.bench.goals import Goal, goals
from aiordma.bench.report import draw, read_reports
from aiordma.bench.suite import Results
from aiordma.bench.table import case_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
REPORTS = PAGE.parent / "performance"
WHOLE_RUN = "goals.json"
END = "<!-- end of the table -->"
# "goals", or the key of a case; then the files of reports, if it is not that of the whole run.
_TABLE = re.compile(rf"(<!-- table (\S+)(?: of (\S+))? -->\n).*?({re.escape(END)})", re.DOTALL)
_COLUMNS = 100
_BOUNDS = {"<=": "at most", "<": "less than", ">=": "at least"}


def updated(page: str) -> str:
    """Return the text of the page with the tables of the reports."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], found[3])}\n{found[4]}", page)


def _table(key: str, files: str | None) -> str:
    results = _read(files or WHOLE_RUN)
    if key == "goals":
        return "\n".join(_goal_lines(goals(results)))
    case = next(case for case in results.cases if case.work.key == key)
    lines = [part for line in case_table(case).split("\n") for part in _wrapped(line)]
    return "\n".join(["```text", *lines, "```"])


@cache
def _read(files: str) -> Results:
    """Read reports. The last one that has a case is used for it."""
    return read_reports([REPORTS / name for name in files.split(",")])


def _wrapped(line: str) -> list[str]:
    if len(line) <= _COLUMNS:
        return [line]
    return textwrap.wrap(line, _COLUMNS, initial_indent="  ", subsequent_indent="    ")


def _goal_lines(found: list[Goal]) -> Iterator[str]:
    yield "| goal | reached | | by |"
    yield "|---|---|---|---|"
    for goal in found:
        bound = f"{_BOUNDS[goal.sign]} {goal.limit:g} {goal.unit}"
        met = "met" if goal.met else "**missed**"
        name = goal.implementation.removeprefix("aiordma ")
        yield f"| {goal.title}: {bound} | {goal.reached:.2f} | {met} | {name} |"


def main() -> None:
    """Update the page, and the diagrams of the reports that its table of goals is of."""
    page = PAGE.read_text()
    PAGE.write_text(updated(page))
    files = next(found[3] for found in _TABLE.finditer(page) if found[2] == "goals")
    draw(_read(files or WHOLE_RUN), REPORTS)


if __name__ == "__main__":
    main()
