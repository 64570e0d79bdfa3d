"""Reports that `--json` wrote, read by `--from`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiordma.bench.errors import BenchError
from aiordma.bench.plan import Work
from aiordma.bench.report import as_json, read_reports
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case, Results
from aiordma.bench.table import as_table
from aiordma.cli import main

PERCENTILES = {"min": 1.0, "50": 2.0, "90": 3.0, "99": 4.0, "99.9": 5.0, "max": 6.0}


def make_results(test: str = "latency", value: float = 40.0) -> Results:
    case = Case(Work(test))
    case.samples["aiordma asyncio"] = {
        1: Sample(value, PERCENTILES, 10.0, 11.0),
        2: Sample(value + 2, PERCENTILES, 12.0, 13.0),
    }
    case.samples["ib_send_lat"] = {1: Sample(20.0), 2: Sample(21.0)}
    case.failures["pyverbs"] = "no device"
    return Results([case], {"rstream": "rdmacm-utils"})


def write_report(path: Path, results: Results) -> Path:
    path.write_text(json.dumps(as_json(results, 2, {}, {})))
    return path


def test_written_report_is_read_unchanged(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.json", make_results())
    assert as_table(read_reports([path])) == as_table(make_results())
    assert read_reports([path]) == make_results()


def test_several_reports_are_merged_and_the_last_has_precedence(tmp_path: Path) -> None:
    first = write_report(tmp_path / "1.json", make_results("latency", 40.0))
    second = write_report(tmp_path / "2.json", make_results("rate", 50.0))
    third = write_report(tmp_path / "3.json", make_results("latency", 60.0))
    cases = read_reports([first, second, third]).cases
    assert [case.work.test for case in cases] == ["latency", "rate"]
    assert cases[0].value("aiordma asyncio") == 61.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a report of aiordma bench"),
        ("[]", "is not a report"),
        ("{}", "is not a report of aiordma bench: KeyError('schema')"),
        ('{"schema": 2}', "has schema 2, not 1"),
        ('{"schema": 1, "cases": [{"key": "x"}], "missing": {}}', "is not a report"),
    ],
)
def test_file_that_is_not_a_report_raises(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        read_reports([path])
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_from_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_report(tmp_path / "report.json", make_results())
    assert main(["bench", "--from", str(path)]) == 1  # pyverbs has failed
    assert capsys.readouterr().out == as_table(make_results()) + "\n"
    assert main(["bench", "--from", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read: No such file" in capsys.readouterr().err


def test_from_with_plot_draws_the_diagrams(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.json", make_results())
    main(["bench", "--from", str(path), "--plot", str(tmp_path / "plots")])
    assert [drawn.name for drawn in (tmp_path / "plots").iterdir()] == ["latency-64.png"]
