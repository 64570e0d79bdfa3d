"""Samples, medians and goals; the table, the JSON and the diagrams; the plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from aiordma.bench.errors import BenchError
from aiordma.bench.goals import goals, is_compared
from aiordma.bench.implementations import IMPLEMENTATIONS, reference, select
from aiordma.bench.plan import LOOPS, MANY, OPERATIONS, PEERS, TESTS, Plan, Work
from aiordma.bench.plot import draw_all
from aiordma.bench.report import as_json, read_reports, write_json
from aiordma.bench.sample import (
    Sample,
    latency_sample,
    median_ratio,
    median_value,
    percentile,
)
from aiordma.bench.suite import Case, Results
from aiordma.bench.table import as_table
from aiordma.cli import bench, main


def rounds(*values: float) -> dict[int, Sample]:
    return {number: Sample(value) for number, value in enumerate(values, 1)}


def case(work: Work, values: dict[str, float]) -> Case:
    """Return the case of one round with these values."""
    return Case(work, {name: rounds(value) for name, value in values.items()})


IDLE = Sample(36.0, details={"latency_alone": 20.0, "latency_among": 26.0, "latency_ratio": 1.3})


def test_percentile_is_one_of_the_values() -> None:
    ordered = [float(number) for number in range(1, 101)]
    found = [percentile(ordered, part) for part in (0.5, 0.9, 0.99, 0.999, 1.0)]
    assert found == [50.0, 90.0, 99.0, 100.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0


def test_latency_sample_is_in_microseconds() -> None:
    sample = latency_sample([5000, 1000, 3000], cpu=0.00003)
    assert sample.value == 3.0
    assert sample.client_cpu == pytest.approx(10.0)
    assert (sample.percentiles["min"], sample.percentiles["max"]) == (1.0, 5.0)


def test_ratio_is_the_median_of_ratios_within_rounds() -> None:
    # The machine was half as fast in the second round. The ratio is not affected.
    assert median_ratio(rounds(10, 20, 12), rounds(5, 10, 6)) == 2.0
    assert median_ratio({3: Sample(9.0)}, rounds(1, 2, 3)) == 3.0
    assert median_ratio({4: Sample(9.0)}, rounds(1, 2, 3)) is None
    assert median_ratio(rounds(1), rounds(0)) is None
    assert (median_value(rounds(3, 1, 2)), median_value({})) == (2.0, None)


def test_sample_is_read_as_it_was_written() -> None:
    sample = latency_sample([1000, 2000])
    assert Sample.from_json(sample.to_json()) == sample
    with pytest.raises(ValueError, match="not a sample"):
        Sample.from_json('{"port": 1}')


RUNS = Sample(150.0, runs=[150.0, 110.0, 120.0])
BEST_LOOP = {
    "aiordma asyncio busy_poll": 30.0,
    "aiordma uvloop busy_poll": 20.0,
    "ib_send_lat": 10.0,
    "TCP uvloop": 40.0,
}


@pytest.mark.parametrize(
    ("cases", "reached", "met"),
    [
        ([case(Work("latency"), BEST_LOOP)], [2.0, 0.5], [True, False]),
        ([Case(Work("idle"), {"aiordma asyncio": {1: IDLE}})], [36.0, 1.3], [True, False]),
        (
            [
                Case(Work("idle", "streams"), {"aiordma ByteStream": {1: replace(IDLE, value=66)}}),
                Case(Work("answering"), {"aiordma asyncio": {1: IDLE}}),
            ],
            [66.0, 1.3, 1.3],
            [False, False, False],
        ),
        (
            [
                Case(Work("connections"), {"aiordma asyncio": {1: RUNS}}),
                case(Work("reconnect"), {"aiordma asyncio": 80.0}),
            ],
            [1.5],
            [True],
        ),
        (
            [
                case(work, {"aiordma asyncio": value, other: 100.0})
                for work, other, value in [
                    (Work("rate"), "ib_send_bw", 50.0),
                    (Work("bandwidth", operation="read", size=65536), "ib_read_bw", 94.0),
                    (Work("connections"), "cmtime", 49.0),
                ]
            ],
            [0.5, 0.94, 0.49],
            [True, False, False],
        ),
        (  # there is no other implementation to compare with
            [
                case(work, {"aiordma asyncio": 1.0})
                for work in (Work("latency"), Work("latency", size=4096), Work("rate"))
            ],
            [],
            [],
        ),
    ],
)
def test_goals_are_reached_or_not(cases: list[Case], reached: list[float], met: list[bool]) -> None:
    found = goals(Results(cases))
    assert ([goal.reached for goal in found], [goal.met for goal in found]) == (reached, met)
    if cases[0].work == Work("latency") and found:
        assert found[0].implementation == "aiordma uvloop busy_poll"
        assert found[1].sign == "<"


# --- the report ---


def small_results() -> Results:
    whole = {"min": 1.0, "50": 2.0, "90": 40.0, "99": 50.0, "99.9": 60.0, "max": 70.0}
    lat = Case(
        Work("latency"),
        {
            "aiordma asyncio": {
                1: Sample(30.0, whole, 12.0, 13.0),
                2: Sample(32.0, {**whole, "90": 44.0}, 12.0, 13.0),
            },
            "ib_send_lat -e": rounds(15.0, 16.0),
            "ib_send_lat": {1: Sample(10.0, {"99": 11.0}), 2: Sample(10.0, {"99": 12.0})},
        },
        {"pyverbs": "the client failed: exit code 1\nTraceback"},
    )
    return Results(
        [
            lat,
            Case(Work("idle", idle=20), {"aiordma asyncio": {1: IDLE}}, loop_times=[0.1, 0.11]),
        ],
        {"cmtime": "rdmacm-utils", "rstream": "rdmacm-utils"},
    )


TABLE = """\
latency: round trips of 64 bytes
                     us   p90   p99  p99.9  x ib_send_lat  client us  server us
  aiordma asyncio  31.0  42.0  50.0   60.0           3.10       12.0       13.0
  ib_send_lat -e   15.5     -     -      -           1.55          -          -
  ib_send_lat      10.0     -  11.5      -           1.00          -          -
  pyverbs: failed: the client failed: exit code 1
    Traceback

idle: 20 connections
                   KiB/connection  client us  server us
  aiordma asyncio            36.0          -          -
  aiordma asyncio: a round trip takes 20.0 us alone, 26.0 us with the others: x 1.30

goals
                                    by               reached    goal                    met
  latency: round trips of 64 bytes  aiordma asyncio     2.00  <= 2.5  x ib_send_lat -e  yes
  idle: 20 connections              aiordma asyncio    36.00   <= 40  KiB each          yes
  idle: 20 connections              aiordma asyncio     1.30  <= 1.2  x latency alone    no

not installed: cmtime, rstream; install rdmacm-utils"""


def test_table_of_results() -> None:
    assert as_table(small_results()) == TABLE
    assert as_table(Results()) == ""
    failed = Case(Work("connections", count=9), failures={"cmtime": "no device"})
    table = "connections: 9, 32 at once\n  cmtime: failed: no device"
    assert as_table(Results([failed])) == table


def test_table_says_if_the_machine_was_not_steady() -> None:
    work = Work("rate")
    samples = {"aiordma asyncio": {1: Sample(9.0)}}
    steady = as_table(Results([Case(work, samples, loop_times=[0.1, 0.11])]))
    changed = as_table(Results([Case(work, samples, loop_times=[0.1, 0.175, 0.12])]))
    line = "  the machine's speed changed: the same loop took 1 to 1.75 times as long"
    assert changed == f"{steady}\n{line}"


def test_json_has_every_sample() -> None:
    whole = as_json(small_results(), 2, {"cpus": 2}, {"perftest": "4.5"})
    found = json.loads(json.dumps(whole))
    assert (found["schema"], found["rounds"], found["machine"]) == (1, 2, {"cpus": 2})
    latency, idle = found["cases"]
    names = [latency[name] for name in ("key", "unit", "reference")]
    assert names == ["latency/64", "us", "ib_send_lat"]
    ours = latency["implementations"][0]
    assert ours["median"] == 31.0
    assert ours["ratios"] == {"ib_send_lat -e": 2.0, "ib_send_lat": pytest.approx(3.1)}
    assert [sample["round"] for sample in ours["samples"]] == [1, 2]
    assert ours["samples"][1]["percentiles"]["90"] == 44.0
    assert latency["failures"].keys() == {"pyverbs"}
    assert idle["implementations"][0]["samples"][0]["details"]["latency_ratio"] == 1.3
    assert [goal["met"] for goal in found["goals"]] == [True, True, False]
    assert idle["loop_times"] == [0.1, 0.11]
    assert found["missing"] == {"cmtime": "rdmacm-utils", "rstream": "rdmacm-utils"}


def write_report(path: Path, results: Results) -> Path:
    path.write_text(json.dumps(as_json(results, 2, {}, {})))
    return path


def test_written_report_is_read_unchanged(tmp_path: Path) -> None:
    assert read_reports([write_report(tmp_path / "report", small_results())]) == small_results()


def test_report_of_before_is_left_if_writing_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report"
    write_json(path, {"round": 1})

    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_json(path, {"round": 2})
    assert json.loads(path.read_text()) == {"round": 1}
    write_json(path, {"round": 3})
    assert json.loads(path.read_text()) == {"round": 3}
    assert list(tmp_path.iterdir()) == [path]


def test_report_can_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    write_json(link, {"round": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"round": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, {"round": 2})
        assert json.loads(os.read(reader, 100)) == {"round": 2}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_several_reports_are_merged_and_the_last_has_precedence(tmp_path: Path) -> None:
    paths = [
        write_report(tmp_path / str(value), Results([case(Work(test), {"aiordma asyncio": value})]))
        for test, value in (("latency", 40.0), ("rate", 50.0), ("latency", 60.0))
    ]
    cases = read_reports(paths).cases
    assert [case.work.test for case in cases] == ["latency", "rate"]
    assert cases[0].value("aiordma asyncio") == 60.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a report of aiordma bench"),
        ("[]", "is not a report"),
        ("{}", "is not a report of aiordma bench: KeyError('schema')"),
        ('{"schema": 2}', "has schema 2, not 1"),
        ('{"schema": 1, "cases": [{"key": "x"}], "missing": {}}', "is not a report"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_that_is_not_a_report_is_an_error(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError) as caught:
        read_reports([path])
    assert f"{path} {message}" in str(caught.value)
    assert main(["bench", "--from", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_from_prints_the_table_and_draws_the_diagrams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plots = write_report(tmp_path / "report", small_results()), tmp_path / "plots"
    for more in ([], ["--plot", str(plots)]):
        assert main(["bench", "--from", str(path), *more]) == 1  # pyverbs has failed
        assert capsys.readouterr().out == TABLE + "\n"
    assert [drawn.name for drawn in plots.iterdir()] == ["latency-64.png"]


def test_tests_of_many_connections_have_no_diagram_of_their_own(tmp_path: Path) -> None:
    ours = {1: latency_sample([3000, 4000, 5000])}
    both = {"aiordma asyncio": 1500.0, "ib_send_bw": 1000.0}
    cases = [
        Case(Work("latency"), {"aiordma asyncio": ours, "ib_send_lat": {1: Sample(2.0)}}),
        case(Work("rate"), both),
        case(Work("bandwidth", size=4096), both),
        case(Work("bandwidth", size=65536), {"aiordma asyncio": 1500.0, "TCP asyncio": 1100.0}),
        case(Work("bandwidth", size=4096, operation="read"), {"ib_read_bw -e": 1300.0}),
        case(Work("connections"), {"cmtime": 600.0}),
        case(Work("idle"), {"aiordma asyncio": 1500.0}),
    ]
    drawn = draw_all(cases, tmp_path)
    names = ["latency-64.png", "rate-64.png", "connections.png", "bandwidth.png"]
    assert [path.name for path in drawn] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    for count, one in ((0, {}), (1, {"aiordma asyncio": ours})):  # failed; without reference
        assert len(draw_all([Case(Work("latency"), one)], tmp_path)) == count
    assert draw_all([], tmp_path) == []


# --- the implementations and the plan ---


def test_names_are_unique_within_a_test() -> None:
    for work in Plan().works():
        names = [one.name for one in IMPLEMENTATIONS if one.supports(work)]
        assert len(names) == len(set(names))
        assert any(name.startswith("aiordma") for name in names)
        assert reference(work) in [*names, ""]


def test_select_filters_by_loops_and_peers() -> None:
    without_peers = select(("trio",), ())
    assert {(one.loop, one.family) for one in without_peers} == {("trio", "aiordma")}
    assert {one.family for one in select(("asyncio",), ("cmtime",))} == {"aiordma", "cmtime"}


def test_goals_need_some_implementations_and_sizes() -> None:
    needed = {
        work.key: {one.name for one in IMPLEMENTATIONS if one.supports(work)}
        & {one.name for one in IMPLEMENTATIONS if is_compared(work, one.name)}
        for work in Plan().works()
    }
    assert needed["latency/4096"] == needed["bandwidth/read/4096"] == set()
    assert needed["connections"] == {f"aiordma {loop}" for loop in LOOPS} | {"cmtime"}
    assert needed["objects/1048576"] == {
        "aiordma MessageStream",
        "aiordma MessageStream busy_poll",
        "ib_read_bw",
    }
    assert needed["idle/streams"] == {"aiordma ByteStream"}
    assert needed["http/1"] == {"aiordma aiohttp", "TCP aiohttp", "aiohttp in memory"}
    assert {"ib_read_bw", "ib_read_bw -e"} <= needed["bandwidth/read/65536"]
    assert "ib_send_bw -e" not in needed["bandwidth/send/65536"]
    assert "TCP asyncio" in needed["latency/64"]
    assert "pyverbs polling" not in needed["latency/64"]


def test_plan_yields_the_work_of_its_choices() -> None:
    keys = [work.key for work in Plan().works()]
    assert keys[:3] == ["latency/64", "latency/4096", "rate/64"]
    assert len(keys) == 2 + 1 + 9 + 2 + 2 + 1 + 2 + 1 + 1
    (chosen,) = Plan(("bandwidth",), (7,), ("read",)).works()
    assert chosen.key == "bandwidth/read/7"
    assert {work.count for work in Plan(count=9).works()} == {9}
    assert all(work.warmup <= 9 for work in Plan(count=9).works() if work.test not in MANY)
    assert {work.warmup for work in Plan(MANY).works()} == {100}
    assert [work.size for work in Plan(("objects",), (7,)).works()] == [1 << 20, 1 << 26]
    assert {work.count for work in Plan(quick=True).works()} <= {1, 16, 20, 50, 200}
    assert all(work.idle <= 2000 for work in Plan(quick=True).works())
    runs = {"idle": 1, "answering": 1, "reconnect": 1, "connections": 3, "objects": 3}
    for work in Plan(busy_poll=0.05).works():
        assert work.busy_poll == (0.1 if work.test in {"bandwidth", "objects"} else 0.05)
        assert work.runs == runs.get(work.test, 6)
        assert work.turns == {"idle": 100, "answering": 300}.get(work.test, 0)
    assert {work.runs for work in Plan(quick=True).works()} == {1}
    assert {work.busy_poll for work in Plan(("bandwidth",), busy_poll=0.5).works()} == {0.5}


def test_names_of_the_command_are_those_of_the_plan() -> None:
    # The command has a list of its own: it prints its help without the native modules.
    assert tuple(TESTS) == bench._TESTS
    assert (bench._OPERATIONS, bench._LOOPS, bench._PEERS) == (OPERATIONS, LOOPS, PEERS)
