"""Runs of real processes: TCP on this machine, failures, missing programs, Ctrl-C."""

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
from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.implementations import Implementation, select
from aiordma.bench.plan import Plan, Work
from aiordma.bench.processes import Pair, run_pair
from aiordma.bench.progress import Progress
from aiordma.bench.sample import Sample
from aiordma.bench.suite import Results, Step, run_suite
from aiordma.cli import main
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

LOCAL = Environment("127.0.0.1", "none0", client_timeout=20.0)
TCP = [one for one in select(("asyncio", "uvloop"), ("tcp",)) if one.family == "tcp"]
LISTENING = "import time; print('{\"port\": 7}', flush=True); "
WORK = Work("latency")

pytestmark = pytest.mark.usefixtures("time_limit")


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def pair(server: str, client: str, port: int = 0, server_exits: bool = True) -> Pair[int]:
    return Pair(python(server), lambda port: [*python(client), str(port)], int, port, server_exits)


def no_progress(_: Step) -> None: ...


def implementation(
    name: str, run: Callable[[Work, Environment], Sample], is_installed: bool = True
) -> Implementation:
    return Implementation(
        name, "aiordma", {"latency": ("send",)}, run, "a package", lambda: is_installed
    )


def succeeding(*_: object) -> Sample:
    return Sample(12.0)


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
def test_tcp_runs_on_both_loops(work: Work) -> None:
    results = Results()
    run_suite(results, [work], TCP, LOCAL, 1, no_progress)
    (case,) = results.cases
    assert case.failures == {}
    assert case.samples.keys() == {"TCP asyncio", "TCP uvloop"}
    for rounds in case.samples.values():
        sample = rounds[1]
        assert sample.value > 0
        assert sample.client_cpu is not None
        assert sample.server_cpu is not None
        assert bool(sample.percentiles) == (work.test == "latency")


def test_server_is_run_with_the_prefix() -> None:
    prefixed = Environment("127.0.0.1", "none0", ("env", "NAME=value"), client_timeout=20.0)
    sample = TCP[0].run(Work("latency", count=2, warmup=0), prefixed)
    assert sample.value > 0


def test_each_round_runs_all_but_those_that_failed_or_are_missing() -> None:
    steps: list[tuple[str, int]] = []
    results = Results()
    listed = [
        implementation("good", lambda *_: Sample(1.0)),
        implementation("bad", failing),
        implementation("absent", failing, is_installed=False),
    ]
    run_suite(
        results,
        [WORK, Work("rate")],
        listed,
        LOCAL,
        2,
        lambda step: steps.append((step.implementation, step.round)),
    )
    assert steps == [("good", 1), ("bad", 1), ("good", 2)]
    (case,) = results.cases
    assert case.samples == {"good": {1: Sample(1.0), 2: Sample(1.0)}}
    assert case.failures == {"bad": "it broke"}
    assert results.missing == {"absent": "a package"}
    assert results.failed


# --- processes ---


def test_outputs_of_both_processes_are_returned() -> None:
    found, output = run_pair(pair(LISTENING + "print('served')", "print(42)"), 20)
    assert (found, output.splitlines()[-1]) == (42, "served")


def test_server_that_fails_at_once_is_quoted() -> None:
    server = "import sys; sys.exit('no device here')"
    with pytest.raises(BenchError, match=r"does not listen: exit code 1\nno device here"):
        run_pair(pair(server, "print(1)"), 20)


def test_server_that_fails_later_ends_the_wait_for_the_client() -> None:
    begin = time.monotonic()
    with pytest.raises(BenchError, match=r"the server failed: exit code 1\nnot now"):
        run_pair(pair(LISTENING + "raise SystemExit('not now')", "import time; time.sleep(60)"), 60)
    assert time.monotonic() - begin < 50


def test_client_that_fails_is_quoted() -> None:
    client = "import sys; print('a'); sys.exit('refused')"
    with pytest.raises(BenchError, match=r"the client failed: exit code 1\nrefused"):
        run_pair(pair(LISTENING + "time.sleep(60)", client), 20)


def test_only_the_last_five_lines_are_quoted() -> None:
    client = "import sys; sys.exit('\\n'.join(map(str, range(99))))"
    with pytest.raises(BenchError) as caught:
        run_pair(pair(LISTENING + "time.sleep(60)", client), 20)
    assert str(caught.value).splitlines()[1:] == ["94", "95", "96", "97", "98"]


def test_client_output_that_cannot_be_parsed_raises() -> None:
    with pytest.raises(BenchError, match="the client's output: invalid literal"):
        run_pair(pair(LISTENING + "time.sleep(60)", "print('what')"), 20)


def test_client_that_runs_too_long_raises() -> None:
    with pytest.raises(BenchError, match="has not finished after 0 seconds"):
        run_pair(pair(LISTENING + "time.sleep(60)", "import time; time.sleep(60)"), 0.2)


def test_program_that_does_not_exist_raises() -> None:
    missing = Pair(["/nowhere/program"], lambda port: [], int)
    with pytest.raises(BenchError, match="/nowhere/program cannot be run: No such file"):
        run_pair(missing, 20)


def test_client_is_retried_until_a_silent_server_listens(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = f"import time, pathlib; time.sleep(0.3); pathlib.Path({str(ready)!r}).touch(); "
    client = f"import os, sys; sys.exit('refused') if not os.path.exists({str(ready)!r}) else 0; "
    found, _ = run_pair(
        pair(server + "time.sleep(60)", client + "print(sys.argv[1])", 99, server_exits=False), 20
    )
    assert found == 99


def test_worker_server_that_exits_with_an_error_raises() -> None:
    with pytest.raises(BenchError, match=r"did not exit normally: exit code 3"):
        run_pair(pair(LISTENING + "time.sleep(5); raise SystemExit(3)", "print(1)"), 20)


def test_client_is_not_retried_after_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_TIMEOUT", 0.3)
    with pytest.raises(BenchError, match="refused"):
        run_pair(pair("import time; time.sleep(60)", "raise SystemExit('refused')", 99), 20)


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
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_environment", lambda host, on_server: LOCAL)


def use(monkeypatch: pytest.MonkeyPatch, *listed: Implementation) -> None:
    monkeypatch.setattr(implementations, "select", lambda loops, peers: list(listed))


BENCH = ["bench", "--quick", "--tests", "latency"]


@pytest.mark.usefixtures("local")
def test_command_prints_and_writes_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, implementation("good", succeeding))
    report = tmp_path / "report.json"
    assert main([*BENCH, "--json", str(report)]) == 0
    output = capsys.readouterr()
    assert "good  12.0" in output.out
    assert "round 1 of 1" in output.err
    assert '"aiordma"' in report.read_text()


@pytest.mark.usefixtures("local")
def test_command_fails_if_an_implementation_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, implementation("good", succeeding), implementation("bad", failing))
    assert main(BENCH) == 1
    output = capsys.readouterr().out
    assert "good  12.0" in output
    assert "bad: failed: it broke" in output


@pytest.mark.usefixtures("local")
def test_interrupted_command_reports_the_samples_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Sample:
        raise KeyboardInterrupt

    use(
        monkeypatch,
        implementation("good", succeeding),
        implementation("slow", interrupted),
    )
    assert main(BENCH) == 130
    assert "good  12.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tests", "latency,speed"], "'speed' is not one of latency, rate"),
        (["--peers", "ucx"], "'ucx' is not one of tcp"),
        (["--sizes", "64,-1"], "'-1' is not a positive number"),
        (["--rounds", "0"], "'0' is not a positive number"),
        (["--busy-poll", "11"], "'11' is not a number of seconds from 0 to 10"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_report_file_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--json", "/nowhere/report.json"]) == 1
    assert "/nowhere/report.json cannot be written: No such file" in capsys.readouterr().err


def test_plot_without_matplotlib_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    assert main([*BENCH, "--plot", str(tmp_path)]) == 1
    assert "pip install 'aiordma[bench]'" in capsys.readouterr().err


def test_no_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "device_addresses", list)
    assert main(BENCH) == 1
    assert "no RDMA device of this machine has an IP address" in capsys.readouterr().err


def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        DeviceAddress("fe80::1", "eth1", "rxe1", TransportType.IB),
        DeviceAddress("127.0.0.1", "eth0", "rxe0", TransportType.IB),
    ]
    monkeypatch.setattr(environment, "device_addresses", lambda: found)


def test_device_is_the_one_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch)
    assert environment.find_environment(None, ()).host == "127.0.0.1"
    assert environment.find_environment("fe80::1", ()).device == "rxe1"
    remote = environment.find_environment("192.0.2.1", ("ssh", "node2"))
    assert (remote.host, remote.device) == ("192.0.2.1", "rxe0")
    assert remote.server_command(["true"]) == ["ssh", "node2", "true"]


def test_host_of_another_machine_without_a_prefix_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_device(monkeypatch)
    assert main([*BENCH, "192.0.2.1"]) == 1
    assert "has the address 192.0.2.1: to run the servers on another" in capsys.readouterr().err


def test_list_prints_implementations_and_their_tests(capsys: pytest.CaptureFixture[str]) -> None:
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
    progress(Step(WORK, "ib_send_lat", 1, 2))
    progress.clear()
    line = "\r\x1b[K0:00  latency: round trips of 64 bytes, round 1 of 2: ib_send_lat"
    assert out.getvalue() == f"{line[:84]}\r\x1b[K"


def test_progress_in_a_file_is_one_line_for_each_round() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for number, name in ((1, "a"), (1, "b"), (2, "a")):
        progress(Step(WORK, name, number, 2))
    progress.clear()
    assert [line.partition("  ")[2] for line in out.getvalue().splitlines()] == [
        "latency: round trips of 64 bytes, round 1 of 2",
        "latency: round trips of 64 bytes, round 2 of 2",
    ]


def test_quick_plans_have_few_operations() -> None:
    assert {work.count for work in Plan(quick=True).works()} <= {16, 20, 50, 200}
