"""`make count`: that it counts, that it does so repeatably, and what it says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.instructions import __main__ as command
from benchmarks.instructions import callgrind, kept
from benchmarks.instructions.callgrind import (
    NATIVE,
    Count,
    CountError,
    by_object,
    count_case,
    read_dumps,
)
from benchmarks.instructions.cases import CASES
from benchmarks.instructions.device import BuildError, build
from benchmarks.instructions.report import as_json, as_table

# What each may cost at most, on any Python: twice what the slowest took, or more.
BOUNDS = {"send": 20_000, "recv": 20_000}
LANES = f"{NATIVE}_fast_path.abi3.so"

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
cob=(2) {LANES}
cfn=(11) send_lane_send
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
def test_a_count_is_repeatable_and_not_too_large(case: str, device: Path, tmp_path: Path) -> None:
    first, second = (count_case(case, 1024, device, tmp_path) for _ in range(2))
    # One Python frame and one call cannot be less; without the C code it would be much more.
    assert 200 < first.instructions < BOUNDS[case]
    assert 20 < first.native < first.instructions / 2
    assert second.instructions == pytest.approx(first.instructions, rel=0.01)
    assert second.native == pytest.approx(first.native, rel=0.01)


def test_a_program_that_fails_is_no_count(tmp_path: Path) -> None:
    absent = tmp_path / "no_device.so"
    with pytest.raises(CountError, match="is not preloaded"):
        count_case("send", 16, absent, tmp_path)


def test_valgrind_that_writes_nothing_is_no_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(callgrind, "find_valgrind", lambda: "/bin/true")
    with pytest.raises(CountError, match="wrote down nothing of send"):
        count_case("send", 16, tmp_path / "device.so", tmp_path)


def test_without_valgrind_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["--cases", "send"]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        "aiordma: valgrind, which counts, is not installed: apt install valgrind\n"
    )
    assert not printed.out


def test_without_a_compiler_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt install gcc"):
        build(tmp_path)


# --- reading what callgrind writes ---


def test_the_cost_of_a_call_is_counted_where_it_arises() -> None:
    costs = by_object(DUMP)
    assert costs == {"/usr/lib/libpython3.so": 63 + 7 + 12 + 530, LANES: 500 + 6 + 100}
    assert costs.total() == 1218


def test_dumps_are_known_by_their_names() -> None:
    end = DUMP.replace("Client Request: once", "Program termination")
    twice = DUMP.replace("once", "twice")
    assert read_dumps([twice, end, DUMP]).keys() == {"once", "twice"}
    assert read_dumps([end]) == {}


def test_the_share_of_c_is_that_of_the_library() -> None:
    other = "/elsewhere/_native/_fast_path.abi3.so"
    assert callgrind._native(Counter({LANES: 5, other: 3, f"{NATIVE}_lib.abi3.so": 2})) == 7


def test_what_would_make_runs_differ_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variables = callgrind._environment(Path("/device.so"))
    assert "PYTHONASYNCIODEBUG" not in variables
    assert variables["PYTHONHASHSEED"] == "0"
    assert variables["LD_PRELOAD"] == "/device.so"
    assert variables["PYTHONPATH"] == f"{callgrind.ROOT}:/elsewhere"


# --- what is kept, and what is said ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kept.json"


def test_counts_are_kept_for_each_python(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.load(file) == {"build": "", "counts": {}}
    kept.save({"send": Count(1000.04, 100, 64), "recv": Count(500, 50, 64)}, file)
    kept.save({"send": Count(1100, 100, 64)}, file)
    assert kept.load(file) == {"build": kept.this_build(), "counts": {"send": 1100, "recv": 500}}
    monkeypatch.setattr(kept, "this_python", lambda: "9.9 toaster")
    assert kept.load(file)["counts"] == {}
    kept.save({"send": Count(1, 1, 64)}, file)
    assert json.loads(file.read_text())["9.9 toaster"]["counts"] == {"send": 1}
    assert len(json.loads(file.read_text())) == 2


def test_what_is_kept_beside_the_program_can_be_read() -> None:
    every = json.loads(kept.KEPT.read_text())
    assert every
    for entry in every.values():
        assert entry["build"]
        assert entry["counts"].keys() == CASES.keys()
        assert all(count > 0 for count in entry["counts"].values())


def test_the_change_is_told_in_percent() -> None:
    counts = {
        "send": Count(1500.4, 120, 64),
        "recv": Count(900, 80, 64),
        "write": Count(2000, 1, 64),
    }
    before = {"build": kept.this_build(), "counts": {"send": 1000.0, "recv": 1000.0}}
    head, send, recv, write = as_table(counts, before).splitlines()
    assert head.split()[-2:] == ["kept", "change"]
    assert send.endswith("1,500             120  1,000  +50.0 %")
    assert recv.split()[-2:] == ["-10.0", "%"]
    assert write.split()[-2:] == ["-", "-"]
    report = as_json(counts, before)
    assert report["cases"]["recv"] == {
        "instructions": 900,
        "native": 80,
        "operations": 64,
        "kept": 1000,
        "change_percent": pytest.approx(-10),
    }
    assert report["cases"]["write"]["change_percent"] is None


def test_another_build_of_python_is_pointed_out() -> None:
    counts = {"send": Count(1500, 120, 64)}
    table = as_table(counts, {"build": "3.0.0, by hand", "counts": {"send": 1500.0}})
    assert table.endswith("kept with another build of Python: 3.0.0, by hand")
    assert "another build" not in as_table(counts, {"build": "", "counts": {}})


def test_the_command_prints_writes_and_keeps(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: Path,
) -> None:
    monkeypatch.setattr(
        command, "count_case", lambda name, times, *_: Count(times * 10, times, times)
    )
    monkeypatch.setattr(kept, "load", lambda: {"build": "", "counts": {"send": 320.0}})
    kept_now: list[object] = []
    monkeypatch.setattr(kept, "save", kept_now.append)
    out = tmp_path / "report.json"
    asked = ["--cases", "send,write", "--operations", "64", "--json", str(out)]
    assert command.main(asked) == 0
    printed = capsys.readouterr()
    assert "+100.0 %" in printed.out
    assert "counting 2 of 2: write" in printed.err
    assert json.loads(out.read_text())["cases"].keys() == {"send", "write"}
    assert not kept_now
    assert command.main([*asked, "--keep"]) == 0
    assert kept_now == [{"send": Count(640, 64, 64), "write": Count(640, 64, 64)}]


@pytest.mark.parametrize(
    "wrong", [["--cases", "sendd"], ["--operations", "0"], ["--operations", "8193"]]
)
def test_what_cannot_be_counted_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(wrong)
    assert refused.value.code == 2
    assert wrong[1] in capsys.readouterr().err
