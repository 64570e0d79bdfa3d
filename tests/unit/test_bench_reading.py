"""Earlier reports, read again."""

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


def results(test: str = "latency", value: float = 40.0) -> Results:
    case = Case(Work(test))
    case.samples["aiordma asyncio"] = {
        1: Sample(value, PERCENTILES, 10.0, 11.0),
        2: Sample(value + 2, PERCENTILES, 12.0, 13.0),
    }
    case.samples["ib_send_lat"] = {1: Sample(20.0), 2: Sample(21.0)}
    case.failures["pyverbs"] = "it has no device"
    return Results([case], {"rstream": "rdmacm-utils"})


def written(path: Path, what: Results) -> Path:
    path.write_text(json.dumps(as_json(what, 2, {}, {})))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "report.json", results())
    assert as_table(read_reports([path])) == as_table(results())
    assert read_reports([path]) == results()


def test_several_become_one_and_the_last_counts(tmp_path: Path) -> None:
    first = written(tmp_path / "1.json", results("latency", 40.0))
    second = written(tmp_path / "2.json", results("rate", 50.0))
    third = written(tmp_path / "3.json", results("latency", 60.0))
    cases = read_reports([first, second, third]).cases
    assert [case.work.test for case in cases] == ["latency", "rate"]
    assert cases[0].value("aiordma asyncio") == 61.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no report of aiordma bench"),
        ("[]", "is no report"),
        ("{}", "is no report of aiordma bench: KeyError('schema')"),
        ('{"schema": 2}', "has schema 2, not 1"),
        ('{"schema": 1, "cases": [{"key": "x"}], "missing": {}}', "is no report"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        read_reports([path])
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "report.json", results())
    assert main(["bench", "--from", str(path)]) == 1  # one had failed
    said = capsys.readouterr()
    assert said.out == as_table(results()) + "\n"
    assert main(["bench", "--from", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read: No such file" in capsys.readouterr().err


def test_the_command_draws_it(tmp_path: Path) -> None:
    path = written(tmp_path / "report.json", results())
    main(["bench", "--from", str(path), "--plot", str(tmp_path / "plots")])
    assert [drawn.name for drawn in (tmp_path / "plots").iterdir()] == ["latency-64.png"]
