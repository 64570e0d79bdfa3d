"""`make count`: repeatable counts, the parser of callgrind's dumps, the baseline, the report."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.instructions import __main__ as command
from benchmarks.instructions import baseline, callgrind
from benchmarks.instructions.callgrind import (
    NATIVE,
    Count,
    CountError,
    count_by_object,
    count_case,
    read_dumps,
)
from benchmarks.instructions.cases import CASES
from benchmarks.instructions.device import BuildError, build
from benchmarks.instructions.report import as_json, as_table

# The maximum of each case on any Python: at least twice the count of the slowest Python.
BOUNDS = {"send": 20_000, "recv": 20_000}
FAST_PATH = f"{NATIVE}_fast_path.abi3.so"

DUMP = f"""\
# callgrind format
version: 1
part: 1

desc: Timerange: Basic block 0 - 209788
desc: Trigger: Client Request: once

positions: line
events: Ir
summary: 1218

ob=(1) /usr/lib/libpython3.so
fl=(2) ???
fn=(10) do_something
0 63
+3 7
cob=(2) {FAST_PATH}
cfn=(11) send_queue_core_send
calls=3 0
0 606
0 12

ob=(2)
fn=(11)
* 500
-4 6
cob=(1)
cfn=(10)
calls=18 0
0 126
fi=(3) inlined.h
0 100

ob=(1)
fn=(12) do_more
0 530

totals: 1218
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("case", BOUNDS)
def test_count_is_repeatable_and_below_its_bound(case: str, device: Path, tmp_path: Path) -> None:
    first, second = (count_case(case, 1024, device, tmp_path) for _ in range(2))
    # The lower bound is about one Python frame and one call. Without the C code the count would be
    # far above the upper bound.
    assert 200 < first.instructions < BOUNDS[case]
    assert 20 < first.native < first.instructions / 2
    assert second.instructions == pytest.approx(first.instructions, rel=0.01)
    assert second.native == pytest.approx(first.native, rel=0.01)


def test_program_that_fails_raises(tmp_path: Path) -> None:
    absent = tmp_path / "no_device.so"
    with pytest.raises(CountError, match="is not preloaded"):
        count_case("send", 16, absent, tmp_path)


def test_valgrind_that_writes_no_dumps_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(callgrind, "find_valgrind", lambda: "/bin/true")
    with pytest.raises(CountError, match="wrote no dumps of send"):
        count_case("send", 16, tmp_path / "device.so", tmp_path)


def test_without_valgrind_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["--cases", "send"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "aiordma: valgrind is not installed: apt install valgrind\n"
    assert not printed.out


def test_without_a_compiler_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt install gcc"):
        build(tmp_path)


# --- reading callgrind's dumps ---


def test_cost_of_a_call_is_counted_for_the_callee() -> None:
    costs = count_by_object(DUMP)
    assert costs == {"/usr/lib/libpython3.so": 63 + 7 + 12 + 530, FAST_PATH: 500 + 6 + 100}
    assert costs.total() == 1218


def test_dumps_are_returned_by_their_names() -> None:
    end = DUMP.replace("Client Request: once", "Program termination")
    twice = DUMP.replace("once", "twice")
    assert read_dumps([twice, end, DUMP]).keys() == {"once", "twice"}
    assert read_dumps([end]) == {}


def test_native_share_is_that_of_aiordma() -> None:
    other = "/elsewhere/_native/_fast_path.abi3.so"
    assert callgrind._native(Counter({FAST_PATH: 5, other: 3, f"{NATIVE}_lib.abi3.so": 2})) == 7


def test_variables_that_make_runs_differ_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variables = callgrind._environment(Path("/device.so"))
    assert "PYTHONASYNCIODEBUG" not in variables
    assert variables["PYTHONHASHSEED"] == "0"
    assert variables["LD_PRELOAD"] == "/device.so"
    assert variables["PYTHONPATH"] == f"{callgrind.ROOT}:/elsewhere"


# --- the baseline and the report ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "baseline.json"


def test_baseline_has_counts_for_each_python(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baseline.load(file) == {"build": "", "counts": {}}
    baseline.save({"send": Count(1000.04, 100, 64), "recv": Count(500, 50, 64)}, file)
    baseline.save({"send": Count(1100, 100, 64)}, file)
    assert baseline.load(file) == {
        "build": baseline.this_build(),
        "counts": {"send": 1100, "recv": 500},
    }
    monkeypatch.setattr(baseline, "this_python", lambda: "9.9 toaster")
    assert baseline.load(file)["counts"] == {}
    baseline.save({"send": Count(1, 1, 64)}, file)
    assert json.loads(file.read_text())["9.9 toaster"]["counts"] == {"send": 1}
    assert len(json.loads(file.read_text())) == 2


def test_committed_baseline_has_all_cases() -> None:
    every = json.loads(baseline.BASELINE.read_text())
    assert every
    for entry in every.values():
        assert entry["build"]
        assert entry["counts"].keys() == CASES.keys()
        assert all(count > 0 for count in entry["counts"].values())


def test_change_is_in_percent() -> None:
    counts = {
        "send": Count(1500.4, 120, 64),
        "recv": Count(900, 80, 64),
        "write": Count(2000, 1, 64),
    }
    stored = {"build": baseline.this_build(), "counts": {"send": 1000.0, "recv": 1000.0}}
    head, send, recv, write = as_table(counts, stored).splitlines()
    assert head.split()[-2:] == ["baseline", "change"]
    assert send.endswith("1,500             120     1,000  +50.0 %")
    assert recv.split()[-2:] == ["-10.0", "%"]
    assert write.split()[-2:] == ["-", "-"]
    report = as_json(counts, stored)
    assert report["cases"]["recv"] == {
        "instructions": 900,
        "native": 80,
        "operations": 64,
        "baseline": 1000,
        "change_percent": pytest.approx(-10),
    }
    assert report["cases"]["write"]["change_percent"] is None


def test_baseline_of_another_build_of_python_is_noted() -> None:
    counts = {"send": Count(1500, 120, 64)}
    table = as_table(counts, {"build": "3.0.0, by hand", "counts": {"send": 1500.0}})
    assert table.endswith("the baseline is of another build of Python: 3.0.0, by hand")
    assert "another build" not in as_table(counts, {"build": "", "counts": {}})


def test_command_prints_the_counts_writes_them_and_saves_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: Path,
) -> None:
    monkeypatch.setattr(
        command, "count_case", lambda name, count, *_: Count(count * 10, count, count)
    )
    monkeypatch.setattr(baseline, "load", lambda: {"build": "", "counts": {"send": 320.0}})
    saved: list[object] = []
    monkeypatch.setattr(baseline, "save", saved.append)
    out = tmp_path / "report.json"
    arguments = ["--cases", "send,write", "--operations", "64", "--json", str(out)]
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert "+100.0 %" in printed.out
    assert "counting 2 of 2: write" in printed.err
    assert json.loads(out.read_text())["cases"].keys() == {"send", "write"}
    assert not saved
    assert command.main([*arguments, "--save-baseline"]) == 0
    assert saved == [{"send": Count(640, 64, 64), "write": Count(640, 64, 64)}]


@pytest.mark.parametrize(
    "wrong", [["--cases", "sendd"], ["--operations", "0"], ["--operations", "8193"]]
)
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(wrong)
    assert refused.value.code == 2
    assert wrong[1] in capsys.readouterr().err
