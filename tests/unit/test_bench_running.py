"""Pairs of processes, really run: TCP on this machine, what fails, what is missing, Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiordma.bench import environment, implementations, processes, report
from aiordma.bench.environment import Place
from aiordma.bench.errors import BenchError
from aiordma.bench.implementations import Contender, chosen
from aiordma.bench.plan import Plan, Work
from aiordma.bench.processes import Pair, run_pair
from aiordma.bench.progress import Progress
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Results, Step, run_suite
from aiordma.cli import main
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

HERE = Place("127.0.0.1", "none0", limit=20.0)
TCP = [
    contender for contender in chosen(("asyncio", "uvloop"), ("tcp",)) if contender.peer == "tcp"
]
LISTENING = "import time; print('{\"port\": 7}', flush=True); "
WORK = Work("latency")

pytestmark = pytest.mark.usefixtures("patience")


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def pair(server: str, client: str, port: int = 0, goes_on: bool = False) -> Pair[int]:
    return Pair(python(server), lambda port: [*python(client), str(port)], int, port, goes_on)


def nothing(_: Step) -> None: ...


def contender(name: str, run: Callable[[Work, Place], Sample], found: bool = True) -> Contender:
    return Contender(name, "aiordma", {"latency": ("send",)}, run, "it", lambda: found)


def failing(*_: object) -> Sample:
    raise BenchError("it broke")


@pytest.mark.parametrize(
    "work",
    [
        Work("latency", count=20, warmup=2),
        Work("rate", count=20, warmup=2),
        Work("bandwidth", size=1 << 17, count=4, warmup=1),
    ],
    ids=lambda work: work.key,
)
def test_tcp_takes_part(work: Work) -> None:
    results = Results()
    run_suite(results, [work], TCP, HERE, 1, nothing)
    (case,) = results.cases
    assert case.failures == {}
    assert case.samples.keys() == {"TCP asyncio", "TCP uvloop"}
    for rounds in case.samples.values():
        sample = rounds[1]
        assert sample.value > 0
        assert sample.client_cpu is not None
        assert sample.server_cpu is not None
        assert bool(sample.percentiles) == (work.test == "latency")


def test_the_server_is_run_by_a_prefix() -> None:
    there = Place("127.0.0.1", "none0", ("env", "WHERE=there"), limit=20.0)
    sample = TCP[0].run(Work("latency", count=2, warmup=0), there)
    assert sample.value > 0


def test_rounds_take_turns_and_who_fails_is_left_out() -> None:
    steps: list[tuple[str, int]] = []
    results = Results()
    contenders = [
        contender("good", lambda work, place: Sample(1.0)),
        contender("bad", failing),
        contender("absent", failing, found=False),
    ]
    run_suite(
        results,
        [WORK, Work("rate")],
        contenders,
        HERE,
        2,
        lambda step: steps.append((step.contender, step.round)),
    )
    assert steps == [("good", 1), ("bad", 1), ("good", 2)]
    (case,) = results.cases
    assert case.samples == {"good": {1: Sample(1.0), 2: Sample(1.0)}}
    assert case.failures == {"bad": "it broke"}
    assert results.missing == {"absent": "it"}
    assert results.failed


# --- processes ---


def test_both_outputs_come_back() -> None:
    found, output = run_pair(pair(LISTENING + "print('served')", "print(42)"), 20)
    assert (found, output.splitlines()[-1]) == (42, "served")


def test_a_server_that_fails_is_quoted() -> None:
    server = "import sys; sys.exit('no device here')"
    with pytest.raises(BenchError, match=r"does not listen: exit code 1\nno device here"):
        run_pair(pair(server, "print(1)"), 20)


def test_a_server_that_fails_later_does_not_keep_the_client_waiting() -> None:
    begin = time.monotonic()
    with pytest.raises(BenchError, match=r"the server failed: exit code 1\nnot now"):
        run_pair(pair(LISTENING + "raise SystemExit('not now')", "import time; time.sleep(60)"), 60)
    assert time.monotonic() - begin < 50


def test_a_client_that_fails_is_quoted() -> None:
    client = "import sys; print('a'); sys.exit('refused')"
    with pytest.raises(BenchError, match=r"the client failed: exit code 1\nrefused"):
        run_pair(pair(LISTENING + "time.sleep(60)", client), 20)


def test_only_the_last_lines_are_quoted() -> None:
    client = "import sys; sys.exit('\\n'.join(map(str, range(99))))"
    with pytest.raises(BenchError) as caught:
        run_pair(pair(LISTENING + "time.sleep(60)", client), 20)
    assert str(caught.value).splitlines()[1:] == ["94", "95", "96", "97", "98"]


def test_output_that_says_nothing() -> None:
    with pytest.raises(BenchError, match="the client's output: invalid literal"):
        run_pair(pair(LISTENING + "time.sleep(60)", "print('what')"), 20)


def test_time_is_limited() -> None:
    with pytest.raises(BenchError, match="not done after 0 seconds"):
        run_pair(pair(LISTENING + "time.sleep(60)", "import time; time.sleep(60)"), 0.2)


def test_a_program_that_is_not_there() -> None:
    nowhere = Pair(["/nowhere/program"], lambda port: [], int)
    with pytest.raises(BenchError, match="/nowhere/program cannot be run: No such file"):
        run_pair(nowhere, 20)


def test_a_silent_server_is_tried_until_it_listens(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = f"import time, pathlib; time.sleep(0.3); pathlib.Path({str(ready)!r}).touch(); "
    client = f"import os, sys; sys.exit('refused') if not os.path.exists({str(ready)!r}) else 0; "
    found, _ = run_pair(
        pair(server + "time.sleep(60)", client + "print(sys.argv[1])", 99, True), 20
    )
    assert found == 99


def test_a_server_of_ours_must_end_well() -> None:
    with pytest.raises(BenchError, match=r"did not end well: exit code 3"):
        run_pair(pair(LISTENING + "time.sleep(5); raise SystemExit(3)", "print(1)"), 20)


def test_a_silent_server_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STARTING", 0.3)
    with pytest.raises(BenchError, match="refused"):
        run_pair(pair("import time; time.sleep(60)", "raise SystemExit('refused')", 99), 20)


@contextmanager
def interrupt_when(ready: Callable[[], bool]) -> Iterator[None]:
    """As Ctrl-C would, once that is so."""

    def look(*_: object) -> None:
        if ready():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_ends_the_children(tmp_path: Path) -> None:
    note = "import os; print(os.getpid(), file=open({!r}, 'w'), flush=True); "
    files = [tmp_path / "server", tmp_path / "client"]
    server, client = (note.format(str(file)) for file in files)
    running = pair(server + LISTENING + "time.sleep(60)", client + "import time; time.sleep(60)")

    def both_run() -> bool:
        return all(file.exists() and file.read_text().endswith("\n") for file in files)

    with interrupt_when(both_run), pytest.raises(KeyboardInterrupt):
        run_pair(running, 60)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


# --- the command ---


@pytest.fixture
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_place", lambda host, on_server: HERE)


def use(monkeypatch: pytest.MonkeyPatch, *contenders: Contender) -> None:
    monkeypatch.setattr(
        "aiordma.bench.implementations.chosen", lambda loops, peers: list(contenders)
    )


BENCH = ["bench", "--quick", "--tests", "latency"]


@pytest.mark.usefixtures("on_this_machine")
def test_the_command_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, contender("good", lambda work, place: Sample(12.0)))
    report = tmp_path / "report.json"
    assert main([*BENCH, "--json", str(report)]) == 0
    output = capsys.readouterr()
    assert "good  12.0" in output.out
    assert "round 1 of 1" in output.err
    assert '"aiordma"' in report.read_text()


@pytest.mark.usefixtures("on_this_machine")
def test_the_command_fails_with_a_contender(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, contender("good", lambda work, place: Sample(12.0)), contender("bad", failing))
    assert main(BENCH) == 1
    output = capsys.readouterr().out
    assert "good  12.0" in output
    assert "bad: failed: it broke" in output


@pytest.mark.usefixtures("on_this_machine")
def test_the_command_reports_what_there_is_when_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(work: Work, place: Place) -> Sample:
        raise KeyboardInterrupt

    use(
        monkeypatch,
        contender("good", lambda work, place: Sample(12.0)),
        contender("slow", interrupted),
    )
    assert main(BENCH) == 130
    assert "good  12.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tests", "latency,speed"], "'speed' is none of latency, rate"),
        (["--peers", "nobody"], "'nobody' is none of tcp"),
        (["--sizes", "64,-1"], "'-1' is not a positive number"),
        (["--rounds", "0"], "'0' is not a positive number"),
        (["--busy-poll", "11"], "'11' is no number of seconds from 0 to 10"),
    ],
)
def test_bad_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--json", "/nowhere/report.json"]) == 1
    assert "/nowhere/report.json cannot be written: No such file" in capsys.readouterr().err


def test_plots_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    assert main([*BENCH, "--plot", str(tmp_path)]) == 1
    assert "pip install 'aiordma[bench]'" in capsys.readouterr().err


def test_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "device_addresses", list)
    assert main(BENCH) == 1
    assert "no RDMA device of this machine has an IP address" in capsys.readouterr().err


def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        DeviceAddress("fe80::1", "eth1", "rxe1", TransportType.IB),
        DeviceAddress("127.0.0.1", "eth0", "rxe0", TransportType.IB),
    ]
    monkeypatch.setattr(environment, "device_addresses", lambda: found)


def test_the_device_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch)
    assert environment.find_place(None, ()).host == "127.0.0.1"
    assert environment.find_place("fe80::1", ()).device == "rxe1"
    there = environment.find_place("192.0.2.1", ("ssh", "there"))
    assert (there.host, there.device) == ("192.0.2.1", "rxe0")
    assert there.at_server(["true"]) == ["ssh", "there", "true"]


def test_another_machine_needs_a_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_device(monkeypatch)
    assert main([*BENCH, "192.0.2.1"]) == 1
    assert "has the address 192.0.2.1: --on-server says" in capsys.readouterr().err


def test_the_contenders_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--peers", "tcp", "--loops", "asyncio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "aiordma asyncio\tlatency, rate, bandwidth, connections, idle"
    assert lines[-1].startswith("TCP asyncio\t")


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line() -> None:
    out = Terminal()
    progress = Progress(out)
    progress(Step(WORK, "somebody", 1, 2))
    progress.clear()
    line = "\r\x1b[K0:00  latency: round trips of 64 bytes, round 1 of 2: somebody"
    assert out.getvalue() == f"{line[:84]}\r\x1b[K"


def test_progress_elsewhere_is_a_line_for_each_round() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for number, name in ((1, "a"), (1, "b"), (2, "a")):
        progress(Step(WORK, name, number, 2))
    progress.clear()
    assert [line.partition("  ")[2] for line in out.getvalue().splitlines()] == [
        "latency: round trips of 64 bytes, round 1 of 2",
        "latency: round trips of 64 bytes, round 2 of 2",
    ]


def test_quick_plans_are_quick() -> None:
    assert {work.count for work in Plan(quick=True).works()} <= {16, 20, 50, 200}
