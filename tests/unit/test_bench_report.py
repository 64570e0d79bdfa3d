"""Samples, medians and ratios; goals; the table and the JSON; the plan and implementations."""

from __future__ import annotations

import json
import string

import pytest

from aiordma.bench.goals import goals
from aiordma.bench.implementations import IMPLEMENTATIONS, reference, select
from aiordma.bench.plan import LOOPS, OPERATIONS, PEERS, TESTS, Plan, Work
from aiordma.bench.report import as_json
from aiordma.bench.sample import Sample, latency_sample, median_ratio, median_value, percentile
from aiordma.bench.suite import Case, Results
from aiordma.bench.table import as_table
from aiordma.cli import bench


def rounds(*values: float) -> dict[int, Sample]:
    return {number: Sample(value) for number, value in enumerate(values, 1)}


def case(work: Work, values: dict[str, float]) -> Case:
    """Return the case of one round with these values."""
    return Case(work, {name: rounds(value) for name, value in values.items()})


IDLE = Sample(36.0, details={"latency_alone": 20.0, "latency_among": 26.0, "latency_ratio": 1.3})


def test_percentile_is_one_of_the_values() -> None:
    ordered = [float(number) for number in range(1, 101)]
    assert [percentile(ordered, part) for part in (0.5, 0.9, 0.99, 0.999, 1.0)] == [
        50.0,
        90.0,
        99.0,
        100.0,
        100.0,
    ]
    assert percentile([7.0], 0.5) == 7.0


def test_latency_sample_is_in_microseconds() -> None:
    sample = latency_sample([5000, 1000, 3000], cpu=0.00003)
    assert sample.value == 3.0
    assert (sample.percentiles["min"], sample.percentiles["max"]) == (1.0, 5.0)
    assert sample.client_cpu == pytest.approx(10.0)


def test_ratio_is_the_median_of_ratios_within_rounds() -> None:
    # The machine was half as fast in the second round. The ratio is not affected.
    assert median_ratio(rounds(10, 20, 12), rounds(5, 10, 6)) == 2.0
    assert median_ratio({3: Sample(9.0)}, rounds(1, 2, 3)) == 3.0
    assert median_ratio({4: Sample(9.0)}, rounds(1, 2, 3)) is None
    assert median_ratio(rounds(1), rounds(0)) is None
    assert median_value(rounds(3, 1, 2)) == 2.0
    assert median_value({}) is None


def test_work_and_sample_are_unpacked_as_they_were_packed() -> None:
    work = Work("bandwidth", operation="read", size=4096, busy_poll=0.5)
    assert Work.unpack(work.pack()) == work
    assert set(work.pack()) <= {*string.ascii_letters, *string.digits, *"-_="}
    sample = latency_sample([1000, 2000])
    assert Sample.from_json(sample.to_json()) == sample
    with pytest.raises(ValueError, match="not a sample"):
        Sample.from_json('{"port": 1}')


def test_goal_takes_the_best_event_loop() -> None:
    values = {
        "aiordma asyncio busy_poll": 30.0,
        "aiordma uvloop busy_poll": 20.0,
        "ib_send_lat": 10.0,
        "TCP uvloop": 40.0,
    }
    perftest_goal, tcp_goal = goals(Results([case(Work("latency"), values)]))
    assert (perftest_goal.implementation, perftest_goal.reached, perftest_goal.met) == (
        "aiordma uvloop busy_poll",
        2.0,
        True,
    )
    assert (tcp_goal.reached, tcp_goal.sign, tcp_goal.met) == (0.5, "<", False)


def test_goals_of_rates_are_lower_bounds() -> None:
    works = [
        (Work("rate"), "ib_send_bw", 50.0),
        (Work("bandwidth", operation="read", size=65536), "ib_read_bw", 94.0),
        (Work("connections"), "cmtime", 49.0),
    ]
    cases = [case(work, {"aiordma asyncio": value, other: 100.0}) for work, other, value in works]
    assert [goal.met for goal in goals(Results(cases))] == [True, False, False]


def test_goals_of_idle_connections() -> None:
    memory, slower = goals(Results([Case(Work("idle"), {"aiordma asyncio": {1: IDLE}})]))
    assert (memory.reached, memory.met) == (36.0, True)
    assert (slower.reached, slower.met) == (1.3, False)


def test_goal_without_the_other_implementation_is_left_out() -> None:
    works = [Work("latency"), Work("latency", size=4096), Work("rate")]
    results = Results([case(work, {"aiordma asyncio": 1.0}) for work in works])
    assert goals(results) == []


# --- the report ---


def small_results() -> Results:
    lat = Case(
        Work("latency"),
        {
            "aiordma asyncio": {
                1: Sample(30.0, {"90": 40.0, "99": 50.0, "99.9": 60.0}, 12.0, 13.0),
                2: Sample(32.0, {"90": 44.0, "99": 50.0, "99.9": 60.0}, 12.0, 13.0),
            },
            "ib_send_lat -e": rounds(15.0, 16.0),
            "ib_send_lat": {1: Sample(10.0, {"99": 11.0}), 2: Sample(10.0, {"99": 12.0})},
        },
        {"pyverbs": "the client failed: exit code 1\nTraceback"},
    )
    return Results(
        [lat, Case(Work("idle", idle=20), {"aiordma asyncio": {1: IDLE}})],
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
  aiordma asyncio: a round trip takes 20.0 us alone, 26.0 us with the idle connections: x 1.30

goals
                                    by               reached    goal                    met
  latency: round trips of 64 bytes  aiordma asyncio     2.00  <= 2.5  x ib_send_lat -e  yes
  idle: 20 connections              aiordma asyncio    36.00   <= 40  KiB each          yes
  idle: 20 connections              aiordma asyncio     1.30  <= 1.2  x latency alone    no

not installed: cmtime, rstream; install rdmacm-utils"""


def test_table_of_small_results() -> None:
    assert as_table(small_results()) == TABLE


def test_table_of_no_results_is_empty() -> None:
    assert as_table(Results()) == ""


def test_table_of_a_case_in_which_all_failed() -> None:
    failed = Case(Work("connections", count=9), failures={"cmtime": "no device"})
    title = "connections: 9, 32 at once"
    assert as_table(Results([failed])) == f"{title}\n  cmtime: failed: no device"


def test_json_has_every_sample() -> None:
    whole = as_json(small_results(), 2, {"cpus": 2}, {"perftest": "4.5"})
    found = json.loads(json.dumps(whole))
    assert (found["schema"], found["rounds"], found["machine"]) == (1, 2, {"cpus": 2})
    latency, idle = found["cases"]
    assert (latency["key"], latency["unit"], latency["reference"]) == (
        "latency/64",
        "us",
        "ib_send_lat",
    )
    ours = latency["implementations"][0]
    assert ours["median"] == 31.0
    assert ours["ratios"] == {"ib_send_lat -e": 2.0, "ib_send_lat": pytest.approx(3.1)}
    assert [sample["round"] for sample in ours["samples"]] == [1, 2]
    assert ours["samples"][1]["percentiles"]["90"] == 44.0
    assert latency["failures"].keys() == {"pyverbs"}
    assert idle["implementations"][0]["samples"][0]["details"]["latency_ratio"] == 1.3
    assert [goal["met"] for goal in found["goals"]] == [True, True, False]
    assert found["missing"] == {"cmtime": "rdmacm-utils", "rstream": "rdmacm-utils"}


# --- the implementations and the plan ---


def test_names_are_unique_within_a_test() -> None:
    for work in Plan().works():
        names = [one.name for one in IMPLEMENTATIONS if one.supports(work)]
        assert len(names) == len(set(names))
        assert any(name.startswith("aiordma") for name in names)
        assert reference(work) in [*names, ""]


def test_select_filters_by_loops_and_peers() -> None:
    without_peers = select(("trio",), ())
    assert {one.loop for one in without_peers} == {"trio"}
    assert {one.family for one in without_peers} == {"aiordma"}
    assert {one.family for one in select(("asyncio",), ("cmtime",))} == {"aiordma", "cmtime"}


def test_plan_yields_the_work_of_its_choices() -> None:
    keys = [work.key for work in Plan().works()]
    assert keys[:3] == ["latency/64", "latency/4096", "rate/64"]
    assert len(keys) == 2 + 1 + 9 + 1 + 1
    assert [work.key for work in Plan(("bandwidth",), (7,), ("read",)).works()] == [
        "bandwidth/read/7"
    ]
    assert all(work.count == 9 and work.warmup <= 9 for work in Plan(count=9).works())
    assert all(work.count <= 200 and work.idle <= 2000 for work in Plan(quick=True).works())


def test_names_of_the_command_are_those_of_the_plan() -> None:
    # The command has a list of its own: it prints its help without the native modules.
    assert tuple(TESTS) == bench._TESTS
    assert (bench._OPERATIONS, bench._LOOPS, bench._PEERS) == (OPERATIONS, LOOPS, PEERS)
