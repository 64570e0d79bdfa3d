"""Runs of real processes: TCP on this machine, failures, missing programs, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from aiordma.bench import environment, implementations, processes, progress, report
from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.implementations import Implementation, select
from aiordma.bench.plan import Work
from aiordma.bench.processes import Pair, run_pair
from aiordma.bench.progress import Progress
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Case, Results, Step, run_suite
from aiordma.cli import main
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

LOCAL = Environment("127.0.0.1", "none0", client_timeout=600.0)
TCP = [one for one in select(("asyncio", "uvloop"), ("tcp",)) if one.family == "tcp"]
LISTENING = "import time; print('{\"port\": 7}', flush=True); "
LISTENS = LISTENING + "time.sleep(60)"
SLEEPS = "import time; time.sleep(60)"
WORK = Work("latency")


def pair(server: str, client: str, port: int = 0, server_exits: bool = True) -> Pair[int]:
    python = [sys.executable, "-S", "-c"]
    command = [*python, client]
    return Pair([*python, server], lambda port: [*command, str(port)], int, port, server_exits)


def implementation(
    name: str, result: Any = None, is_installed: bool = True, family: str = "aiordma"
) -> Implementation:
    """Return an implementation of latency. `result` is its sample, or the error that it raises."""

    def run(*_: object) -> Sample:
        if isinstance(result, BaseException):
            raise result
        return Sample(12.0)

    tests = {"latency": ("send",)}
    return Implementation(name, family, tests, run, "a package", lambda: is_installed)


def end_by_signal(*_: object) -> Sample:
    os.kill(os.getpid(), signal.SIGTERM)
    return Sample(12.0)


GOOD, BAD = implementation("good"), implementation("bad", BenchError("it broke"))


@pytest.mark.parametrize(
    "work",
    [
        Work("latency", count=20, warmup=2),
        Work("rate", count=20, warmup=2),
        Work("bandwidth", size=1 << 17, count=4, warmup=1),
    ],
    ids=lambda work: work.key,
)
def test_tcp_runs_on_both_loops(work: Work) -> None:
    results, prefix = Results(), ("env", "NAME=value")
    place = Environment("127.0.0.1", "none0", prefix, client_timeout=600.0)
    finished: list[Case] = []
    run_suite(results, [work], TCP, place, 1, lambda step: None, finished.append)
    (case,) = results.cases
    assert finished == [case]
    assert case.failures == {}
    assert case.samples.keys() == {"TCP asyncio", "TCP uvloop"}
    for rounds in case.samples.values():
        sample = rounds[1]
        assert sample.value > 0
        assert None not in (sample.client_cpu, sample.server_cpu)
        assert bool(sample.percentiles) == (work.test == "latency")


def test_each_round_runs_all_but_those_that_failed_or_are_missing() -> None:
    steps: list[tuple[str, int]] = []
    results, listed = Results(), [GOOD, BAD, implementation("absent", is_installed=False)]

    def note(step: Step) -> None:
        steps.append((step.implementation, step.round))

    run_suite(results, [WORK, Work("rate")], listed, LOCAL, 2, note, lambda case: None)
    assert steps == [("good", 1), ("bad", 1), ("good", 2)]
    (case,) = results.cases
    assert case.samples == {"good": {1: Sample(12.0), 2: Sample(12.0)}}
    assert case.failures == {"bad": "it broke"}
    assert results.missing == {"absent": "a package"}
    assert results.failed


def test_every_second_round_has_the_opposite_order() -> None:
    steps: list[str] = []
    results, listed = Results(), [implementation(name) for name in ("a", "b", "c")]

    def note(step: Step) -> None:
        steps.append(step.implementation)

    run_suite(results, [WORK], listed, LOCAL, 3, note, lambda case: None)
    assert steps == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    loop_times = results.cases[0].loop_times
    assert len(loop_times) == len(steps)
    assert min(loop_times) > 0


def test_the_best_run_of_a_round_is_kept_with_the_values_of_all() -> None:
    values = iter([30.0, 50.0, 40.0, 20.0, 5.0, 20.0])
    steps: list[tuple[str, int]] = []

    def run(*_: object) -> Sample:
        value = next(values)
        return Sample(value, client_cpu=value)

    listed = [replace(implementation("a"), run=run, tests={"bandwidth": ("send",)})]
    work = Work("bandwidth", runs=3)

    def note(step: Step) -> None:
        steps.append((step.implementation, step.round))

    results = Results()
    run_suite(results, [work], listed, LOCAL, 2, note, lambda case: None)
    assert steps == [("a", 1)] * 3 + [("a", 2)] * 3
    assert results.cases[0].samples["a"] == {
        1: Sample(50.0, client_cpu=50.0, runs=[30.0, 50.0, 40.0]),
        2: Sample(20.0, client_cpu=20.0, runs=[20.0, 5.0, 20.0]),
    }


def test_the_best_run_of_a_time_is_the_shortest() -> None:
    case = Case(Work("latency", runs=2))
    case.add("a", 1, Sample(3.0))
    case.add("a", 1, Sample(2.0))
    assert case.samples == {"a": {1: Sample(2.0, runs=[3.0, 2.0])}}


def test_runs_of_a_round_have_the_opposite_order_in_turn() -> None:
    steps: list[str] = []
    listed = [implementation(name) for name in ("a", "b")]

    def note(step: Step) -> None:
        steps.append(step.implementation)

    work = replace(WORK, runs=3)
    run_suite(Results(), [work], listed, LOCAL, 1, note, lambda case: None)
    assert steps == ["a", "b", "b", "a", "a", "b"]


def test_other_programs_are_spread_among_those_of_aiordma() -> None:
    steps: list[str] = []
    results = Results()
    listed = [implementation(name) for name in ("a", "b", "c", "d")]
    listed += [implementation(name, family="tcp") for name in ("x", "y")]

    def note(step: Step) -> None:
        steps.append(step.implementation)

    run_suite(results, [WORK], listed, LOCAL, 1, note, lambda case: None)
    assert steps == ["a", "x", "b", "c", "y", "d"]
    assert list(results.cases[0].samples) == [one.name for one in listed]


def test_only_what_is_wanted_is_run() -> None:
    results, listed = Results(), [GOOD, BAD, implementation("absent", is_installed=False)]
    works = [WORK, replace(WORK, size=7)]

    def is_wanted(work: Work, name: str) -> bool:
        return work.size == 7 and name == "good"

    run_suite(results, works, listed, LOCAL, 1, lambda step: None, lambda case: None, is_wanted)
    assert [(case.work.size, list(case.samples)) for case in results.cases] == [(7, ["good"])]
    assert results.missing == {}


# --- processes ---


def test_result_of_the_client_is_returned() -> None:
    assert run_pair(pair(LISTENING, "print(42)"), 600) == 42


@pytest.mark.parametrize(
    ("server", "client", "seconds", "error"),
    [
        ("raise SystemExit('none')", "print(1)", 20, "does not listen: exit code 1\nnone"),
        (LISTENING + "raise SystemExit('no')", SLEEPS, 60, "the server failed: exit code 1\nno"),
        (LISTENS, "raise SystemExit('refused')", 20, "the client failed: exit code 1\nrefused"),
        (LISTENS, r"raise SystemExit('\n'.join('abcdefgh'))", 20, "exit code 1\nd\ne\nf\ng\nh$"),
        (LISTENS, "print('what')", 20, "the client's output: invalid literal"),
        (LISTENS, SLEEPS, 0.2, "has not finished after 0 seconds"),
    ],
)
def test_a_failure_is_quoted(server: str, client: str, seconds: float, error: str) -> None:
    with pytest.raises(BenchError, match=error):
        run_pair(pair(server, client), seconds)


def test_server_that_exits_with_an_error_raises(tmp_path: Path) -> None:
    """The server ends after its client, when the client's exit code was read."""
    pid = str(tmp_path / "pid")
    client = f"import os; print(os.getpid(), end='', file=open({pid!r}, 'w')); print(1)"
    ended = f"os.path.exists({pid!r}) and not os.path.exists('/proc/' + open({pid!r}).read())"
    server = f"import os\nwhile not ({ended}): time.sleep(0.01)\nraise SystemExit(3)"
    with pytest.raises(BenchError, match=r"did not exit normally: exit code 3"):
        run_pair(pair(LISTENING + server, client), 600)


def test_program_that_does_not_exist_raises() -> None:
    missing = Pair(["/nowhere/program"], lambda port: [], int)
    with pytest.raises(BenchError, match="/nowhere/program cannot be run: No such file"):
        run_pair(missing, 600)


def test_client_is_retried_until_a_silent_server_listens(tmp_path: Path) -> None:
    refused, ready = (str(tmp_path / name) for name in ("refused", "ready"))
    server = (
        f"import os, pathlib, time\nwhile not os.path.exists({refused!r}): time.sleep(0.01)\n"
        f"pathlib.Path({ready!r}).touch()\ntime.sleep(60)"
    )
    client = (
        f"import os, pathlib, sys\nif not os.path.exists({ready!r}):\n"
        f"    pathlib.Path({refused!r}).touch()\n    sys.exit('refused')\nprint(sys.argv[1])"
    )
    assert run_pair(pair(server, client, 99, server_exits=False), 60) == 99


def test_client_is_not_retried_after_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_TIMEOUT", 0.3)
    with pytest.raises(BenchError, match="refused"):
        run_pair(pair(SLEEPS, "raise SystemExit('refused')", 99), 600)


CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
NOTES_A_START = "print('start', file=open({!r}, 'a'), flush=True); "


def test_server_is_started_again_after_a_crash_of_its_client(tmp_path: Path) -> None:
    """Each client waits for its server. The first one crashes, the second prints 42."""
    starts, crashed = tmp_path / "starts", str(tmp_path / "crashed")
    client = (
        f"import os, time\n"
        f"is_first = not os.path.exists({crashed!r})\n"
        f"while open({str(starts)!r}).read().count('start') < 2 - is_first: time.sleep(0.01)\n"
        f"if is_first:\n    open({crashed!r}, 'w')\n    {CRASHES}\n"
        f"print(42)"
    )
    starts.touch()
    server = NOTES_A_START.format(str(starts)) + SLEEPS
    assert run_pair(pair(server, client, 99, server_exits=False), 60) == 42
    assert starts.read_text().count("start") == 2


@pytest.mark.parametrize(
    ("end", "seconds", "error"),
    [
        (CRASHES, 60, "the client failed: exit code -6"),
        (SLEEPS, 1.5, "the client has not finished after"),
    ],
    ids=["crash", "hang"],
)
@pytest.mark.parametrize(
    ("server", "port", "runs"), [(SLEEPS, 99, 3), (LISTENS, 0, 1)], ids=["c_program", "aiordma"]
)
def test_a_client_that_crashes_or_hangs_again_and_again_fails(
    server: str, port: int, runs: int, end: str, seconds: float, error: str
) -> None:
    both, ports = pair(server, end, port), []

    def client(number: int) -> Sequence[str]:
        ports.append(number)
        return both.client(number)

    with pytest.raises(BenchError, match=error):
        run_pair(replace(both, client=client), seconds)
    assert len(ports) == runs


@pytest.mark.parametrize("end", [CRASHES, "raise SystemExit(1)"], ids=["crash", "error"])
def test_server_that_ends_is_started_again_only_after_a_crash(end: str, tmp_path: Path) -> None:
    """As with cmtime: when the first server has ended, the first client exits without an error."""
    pid, clients = tmp_path / "pid", tmp_path / "clients"
    server = (
        f"import os, time\n"
        f"if os.path.exists({str(pid)!r}): time.sleep(60)\n"
        f"with open({str(pid)!r}, 'w') as file: print(os.getpid(), file=file)\n"
        f"while not os.path.exists({str(clients)!r}): time.sleep(0.01)\n{end}"
    )
    client = (
        f"import os, pathlib, time\n"
        f"pid, clients = pathlib.Path({str(pid)!r}), pathlib.Path({str(clients)!r})\n"
        f"is_first = not clients.exists()\n"
        f"clients.open('a').write('client ')\n"
        f"while not (pid.exists() and pid.read_text()): time.sleep(0.01)\n"
        f"stat = pathlib.Path('/proc', pid.read_text().strip(), 'stat')\n"
        f"while stat.exists() and stat.read_text().split()[2] != 'Z': time.sleep(0.01)\n"
        f"print('rejected' if is_first else 42)"
    )
    both = pair(server, client, 99, server_exits=False)
    if end == CRASHES:
        assert run_pair(both, 60) == 42
    else:
        with pytest.raises(BenchError, match="exit code 1"):
            run_pair(both, 60)
    assert clients.read_text() == "client " * (2 if end == CRASHES else 1)


def test_a_crash_counts_although_the_server_fails_because_of_it() -> None:
    both = pair("raise SystemExit('disconnected')", CRASHES, 99)
    server, client = processes.Child(both.server), processes.Child(both.client(99))
    try:
        assert server.wait(20)
        assert client.wait(20)
        with pytest.raises(processes.CrashError, match="the client failed: exit code -6"):
            processes._client_result(both, client, server, 600)
    finally:
        server.end()
        client.end()


@contextmanager
def interrupt_when(ready: Callable[[], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block, as Ctrl-C does, once `ready()` is true."""

    def interrupt(*_: object) -> None:
        if ready():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupt_ends_both_processes(tmp_path: Path) -> None:
    note = "import os; print(os.getpid(), file=open({!r}, 'w'), flush=True); "
    files = [tmp_path / "server", tmp_path / "client"]
    server, client = (note.format(str(file)) for file in files)

    def both_run() -> bool:
        return all(file.exists() and file.read_text().endswith("\n") for file in files)

    with interrupt_when(both_run), pytest.raises(KeyboardInterrupt):
        run_pair(pair(server + LISTENS, client + SLEEPS), 60)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


# --- the command ---

BENCH = ["bench", "--quick", "--tests", "latency"]


@pytest.mark.parametrize(
    ("listed", "code", "lines"),
    [
        ([GOOD], 0, ["good  12.0"]),
        ([GOOD, BAD], 1, ["good  12.0", "bad: failed: it broke"]),
        ([GOOD, implementation("slow", KeyboardInterrupt())], 130, ["good  12.0"]),
        ([GOOD, replace(implementation("slow"), run=end_by_signal)], 130, ["good  12.0"]),
    ],
)
def test_command_prints_and_writes_the_samples_so_far(
    listed: list[Implementation],
    code: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(environment, "find_environment", lambda host, on_server: LOCAL)
    monkeypatch.setattr(implementations, "select", lambda loops, peers: listed)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main([*BENCH, "--json", str(tmp_path / "report")]) == code
    finally:
        assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN
    output = capsys.readouterr()
    assert [line for line in lines if line not in output.out] == []
    assert "round 1 of 1" in output.err
    assert '"good"' in (tmp_path / "report").read_text()


def test_command_shows_and_writes_each_case_before_it_begins_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run that is killed then leaves the report of the cases that were finished."""
    path = tmp_path / "report"
    seen: list[tuple[str, list[str]]] = []

    def run(*_: object) -> Sample:
        cases = json.loads(path.read_text())["cases"] if path.read_text() else []
        seen.append((capsys.readouterr().out, [case["key"] for case in cases]))
        return Sample(12.0)

    listed = [replace(GOOD, run=run)]
    monkeypatch.setattr(environment, "find_environment", lambda host, on_server: LOCAL)
    monkeypatch.setattr(implementations, "select", lambda loops, peers: listed)
    assert main([*BENCH, "--sizes", "64,128", "--json", str(path)]) == 0
    (_, before), (table, after) = seen
    assert (before, after) == ([], ["latency/64"])
    assert table.startswith("latency: round trips of 64 bytes")
    assert table.endswith("\n\n")
    assert [case["key"] for case in json.loads(path.read_text())["cases"]] == [
        "latency/64",
        "latency/128",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--tests latency,speed", 2, "'speed' is not one of latency, rate"),
        ("--peers ucx", 2, "'ucx' is not one of tcp"),
        ("--sizes 64,-1", 2, "'-1' is not a positive number"),
        ("--rounds 0", 2, "'0' is not a positive number"),
        ("--busy-poll 11", 2, "'11' is not a number of seconds from 0 to 10"),
        ("--json /nowhere/report", 1, "/nowhere/report cannot be written: No such file"),
        ("--plot plots", 1, "pip install 'aiordma[bench]'"),
        ("", 1, "no RDMA device of this machine has an IP address"),
        ("no.such.name.invalid", 1, "no.such.name.invalid: "),
        ("192.0.2.1", 1, "has the address 192.0.2.1: to run the servers on another"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    monkeypatch.setattr(environment, "device_addresses", lambda: DEVICES if arguments else [])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([*BENCH, *arguments.split()]))
    assert (ended.value.code, message in capsys.readouterr().err) == (code, True)


DEVICES = [
    DeviceAddress("fe80::1", "eth1", "rxe1", TransportType.IB, 1),
    DeviceAddress("127.0.0.1", "eth0", "rxe0", TransportType.IB, 1),
]


def test_device_is_the_one_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "device_addresses", lambda: DEVICES)
    assert environment.find_environment(None, ()).host == "127.0.0.1"
    assert environment.find_environment("fe80::1", ()).device == "rxe1"
    remote = environment.find_environment("192.0.2.1", ("ssh", "node2"))
    assert (remote.host, remote.device) == ("192.0.2.1", "rxe0")
    assert remote.server_command(["true"]) == ["ssh", "node2", "true"]


def test_list_prints_implementations_and_their_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--peers", "tcp", "--loops", "asyncio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "aiordma asyncio\tlatency, rate, bandwidth, connections, idle, answering, reconnect"
    )
    assert lines[-1] == "aiohttp in memory\thttp"


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_one_for_each_round_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "time", Mock(monotonic=lambda: 5.0))
    terminal, file = Terminal(), io.StringIO()
    for out, steps in ((terminal, [(1, "ib_send_lat")]), (file, [(1, "a"), (1, "b"), (2, "a")])):
        shown = Progress(out)
        for number, name in steps:
            shown(Step(WORK, name, number, 2))
        shown.clear()
    title = "latency: round trips of 64 bytes, round"
    line = f"\r\x1b[K0:00  {title} 1 of 2: ib_send_lat"
    assert terminal.getvalue() == f"{line[:84]}\r\x1b[K"
    lines = [line.partition("  ")[2] for line in file.getvalue().splitlines()]
    assert lines == [f"{title} 1 of 2", f"{title} 2 of 2"]
