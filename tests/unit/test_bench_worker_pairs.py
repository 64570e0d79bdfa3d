"""Pairs of worker processes: several runs in the same processes, and what ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from aiordma.bench import worker_pairs
from aiordma.bench.environment import Environment
from aiordma.bench.errors import BenchError
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.worker_pairs import WorkerPairs, WorkerProcess

LOCAL = Environment("127.0.0.1", "none0")
WORK = Work("latency", count=5, warmup=2)
# A server and a client that do no work. `{}` is what they do for each line.
PROGRAM = """
import json, os, signal, sys
for number, line in enumerate(sys.stdin):
    role, kind, host, port, work = json.loads(line)
    client, server = role == "client", role == "server"
    {}
    if client:
        print("a warning")
        print(json.dumps(dict(value=number + 1, details=dict(pid=os.getpid(), port=port))))
    else:
        print(json.dumps(dict(port=7)), flush=True)
        print(json.dumps(dict(cpu=7e-6)))
    sys.stdout.flush()
"""


@pytest.fixture
def workers() -> Iterator[WorkerPairs]:
    with closing(WorkerPairs()) as pairs:
        yield pairs


def use(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pairs run this program in place of aiordma.bench.workers."""
    command = (sys.executable, "-Suc", PROGRAM.format(program))
    monkeypatch.setattr(worker_pairs, "COMMAND", command)


@pytest.mark.parametrize("kind", ["tcp", "trio tcp", "http tcp", "http memory"])
def test_workers_run_one_work_after_another(kind: str, workers: WorkerPairs) -> None:
    loop = "trio" if kind == "trio tcp" else "asyncio"
    test = "http" if kind.startswith("http") else "latency"
    works = [Work(test, count=count, warmup=1, concurrency=1, loop=loop) for count in (3, 4)]
    for work in works:
        sample = workers.run(kind, work, LOCAL)
        assert sample.value > 0
        assert None not in (sample.client_cpu, sample.server_cpu)


def test_pair_is_kept_for_its_kind_and_loop(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("pass", monkeypatch)
    runs = [("a", "asyncio"), ("b", "asyncio"), ("a", "trio"), ("a", "asyncio")]
    samples = [workers.run(kind, Work("rate", loop=loop), LOCAL) for kind, loop in runs]
    assert [sample.value for sample in samples] == [1, 1, 1, 2]
    assert len({sample.details["pid"] for sample in samples}) == 3
    assert {sample.details["port"] for sample in samples} == {7}


def test_work_of_many_connections_has_its_own_processes(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("pass", monkeypatch)
    for _ in range(2):
        assert workers.run("idle", Work("idle"), LOCAL).value == 1


# A client without idle connections has latencies of 1, 2, 3... us in its turns, one with them has
# ten times as much. Each writes its turns to a file. The value of its sample is their number.
TURNS = """
if client:
    print(json.dumps(dict(ready=True)), flush=True)
    for turn, line in enumerate(sys.stdin, 1):
        if line != "turn\\n":
            break
        with open({file!r}, "a") as file:
            file.write("%d " % work["idle"])
        latency = turn * (10 if work["idle"] else 1)
        print(json.dumps(dict(median=latency)), flush=True)
    number = turn - 2
"""


def use_turns(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients of pairs take turns, which they write to this file."""
    use(f"exec({TURNS.format(file=str(file))!r})", monkeypatch)


def test_work_with_and_without_idle_connections_takes_turns(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order of a pair of turns is the opposite of that before."""
    use_turns(tmp_path / "turns", monkeypatch)
    sample = workers.run("idle", Work("idle", idle=7, turns=3), LOCAL)
    assert (tmp_path / "turns").read_text() == "0 7 7 0 0 7 "
    assert sample.value == 3
    assert sample.server_cpu == pytest.approx(1.0)
    latencies = {"latency_alone": 2.0, "latency_among": 20.0, "latency_ratio": 10.0}
    assert sample.details.items() >= {**latencies, "port": 7}.items()


def test_processes_of_turns_are_ended(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[WorkerProcess] = []
    start = WorkerProcess.__init__

    def record(self: WorkerProcess, role: str, command: Sequence[str]) -> None:
        start(self, role, command)
        started.append(self)

    monkeypatch.setattr(WorkerProcess, "__init__", record)
    use_turns(tmp_path / "turns", monkeypatch)
    workers.run("idle", Work("idle", turns=1), LOCAL)
    assert [process.code for process in started] == [-9] * 4
    use("client and work['idle'] and sys.exit('refused')", monkeypatch)
    with pytest.raises(BenchError, match="the client failed: exit code 1\nrefused"):
        workers.run("idle", Work("idle", turns=1), LOCAL)
    assert [process.code for process in started[4:]] == [-9, -9, -9, 1]


def test_server_cpu_is_divided_by_the_operations(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("pass", monkeypatch)
    assert workers.run("tcp", WORK, LOCAL).server_cpu == pytest.approx(1.0)


WAIT = "signal.pause()"  # until it is killed


@pytest.mark.parametrize(
    ("program", "seconds", "error"),
    [
        ("server and sys.exit('none')", 600, "the server failed: exit code 1\nnone"),
        ("client and sys.exit('refused')", 600, "the client failed: exit code 1\nrefused"),
        (f"client and {WAIT}", 0.2, "the client has not finished after 0 seconds"),
        ("client and print('{\"what\": 1}')", 600, "the client's output: not a sample"),
    ],
)
def test_a_failure_is_quoted(
    program: str,
    seconds: float,
    error: str,
    workers: WorkerPairs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(program, monkeypatch)
    with pytest.raises(BenchError, match=error):
        workers.run("tcp", WORK, Environment("127.0.0.1", "none0", client_timeout=seconds))


def test_client_is_not_waited_for_if_the_server_has_failed(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails after it has announced its port."""
    fail = "print(json.dumps(dict(port=7)), flush=True); sys.exit('died')"
    use(f"exec({fail!r}) if server else {WAIT}", monkeypatch)
    with pytest.raises(BenchError, match="the server failed: exit code 1\ndied"):
        workers.run("tcp", WORK, LOCAL)


def test_pair_that_failed_is_replaced(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "failed"
    once = f"client and not os.path.exists({str(file)!r}) and sys.exit(open({str(file)!r}, 'w'))"
    use(once, monkeypatch)
    with pytest.raises(BenchError):
        workers.run("tcp", WORK, LOCAL)
    assert workers.run("tcp", WORK, LOCAL).value == 1


def test_worker_that_was_killed_between_two_works_is_an_error(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("pass", monkeypatch)
    sample = workers.run("tcp", WORK, LOCAL)
    os.kill(int(sample.details["pid"]), 9)
    with pytest.raises(BenchError, match="the client failed: exit code -9"):
        workers.run("tcp", WORK, LOCAL)


def test_closing_kills_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    use("pass", monkeypatch)
    with closing(WorkerPairs()) as pairs:
        pid = int(pairs.run("tcp", WORK, LOCAL).details["pid"])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_worker_exits_at_the_end_of_its_input() -> None:
    """The benchmark was killed: its pipe is closed."""
    subprocess.run(worker_pairs.COMMAND, stdin=subprocess.DEVNULL, check=True)


def test_program_that_does_not_exist_raises(workers: WorkerPairs) -> None:
    missing = Environment("127.0.0.1", "none0", ("/nowhere/ssh",))
    with pytest.raises(BenchError, match="/nowhere/ssh cannot be run: No such file"):
        workers.run("tcp", WORK, missing)


def test_sample_has_what_the_client_printed(
    workers: WorkerPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Sample(3.0, {"50": 2.0}, 1.0, details={"seconds": 4.0})
    use(f"print({own.to_json()!r}) if client else None", monkeypatch)
    assert workers.run("tcp", WORK, LOCAL).details == {"seconds": 4.0}
