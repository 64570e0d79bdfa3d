"""docs/performance.md has the tables of the reports beside it."""

from __future__ import annotations

from benchmarks import performance_page
from benchmarks.performance_page import END, PAGE, REPORTS, updated


def test_the_tables_are_those_of_the_reports() -> None:
    page = PAGE.read_text()
    assert page.count(END) > 15
    assert updated(page) == page


def test_each_report_is_shown_or_drawn() -> None:
    page = PAGE.read_text()
    for report in REPORTS.glob("*.json"):
        assert f"performance/{report.name}" in page


def test_a_table_is_replaced_and_wrapped() -> None:
    page = f"before\n<!-- table reconnect -->\nold\n{END}\nafter\n"
    lines = updated(page).splitlines()
    assert (lines[0], lines[-1], lines[2]) == ("before", "after", "```text")
    assert "old" not in lines
    assert max(map(len, lines)) <= performance_page._COLUMNS
