"""Shared parts of the lab's tests.

These tests boot virtual machines. `aiordma lab setup` must have prepared this machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
LAB_RUN = (sys.executable, "-m", "aiordma", "lab", "run")

Process = subprocess.Popen[bytes]
Start = Callable[..., Process]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of this process, with aiordma importable from any directory."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


def lab_run(
    *command: str,
    cwd: Path,
    options: tuple[str, ...] = (),
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in the lab and wait until it ends."""
    argv, env = [*LAB_RUN, *options, "--", *command], environment() if env is None else env
    return subprocess.run(argv, input=stdin, capture_output=True, cwd=cwd, env=env, timeout=600)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of process `pid`, which its threads have started."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in texts for child in text.split()]


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(is_over: Callable[[], bool], limit: float = 60) -> None:
    """Wait until a condition is true. Fail after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not is_over():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a command in the lab.

    After the test, the processes that still run are killed.
    """
    started: list[Process] = []

    def start_one(*command: str, **options: Any) -> Process:
        settings: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process: Process = subprocess.Popen(
            [*LAB_RUN, "--", *command], cwd=tmp_path, env=environment(), **(settings | options)
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
