"""The long steps of setting up: one line each, with the time it took; their output in a log."""

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import LabError
from .files import cache_dir

__all__ = ["command", "log_path", "pipeline", "say", "step"]


def log_path() -> Path:
    """The file that takes the output of apt, tar and the compiler."""
    return cache_dir() / "setup.log"


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is going on, and for how long; on a terminal the seconds count while it does."""
    started = time.monotonic()
    done = threading.Event()
    ticker = threading.Thread(target=_tick, args=(what, started, done), daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    result = "failed"
    try:
        yield
        result = "done"
    finally:
        done.set()
        if ticker.ident is not None:
            ticker.join()
        seconds = time.monotonic() - started
        start_of_line = "\r" if sys.stderr.isatty() else ""
        say(f"{start_of_line}lab: {what}: {result} in {seconds:.0f} s\n")


def say(text: str) -> None:
    """Tell the user, at once."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _tick(what: str, started: float, done: threading.Event) -> None:
    while not done.wait(0.5):
        seconds = time.monotonic() - started
        say(f"\rlab: {what} ... {seconds:.0f} s")


def command(argv: Sequence[str], failure: str, *, cwd: Path | None = None) -> None:
    """Run a program, its output to the log.

    Raises: LabError with the sentence `failure` when it fails.
    """
    pipeline([argv], failure, cwd=cwd)


def pipeline(commands: Sequence[Sequence[str]], failure: str, *, cwd: Path | None = None) -> None:
    """Run programs, each reading the one before; the last one's output goes to the log.

    Raises: LabError with the sentence `failure` when one of them fails.
    """
    log_path().parent.mkdir(parents=True, exist_ok=True)
    with log_path().open("ab") as log:
        log.write(f"$ {' | '.join(map(shlex.join, commands))}\n".encode())
        log.flush()
        processes: list[subprocess.Popen[bytes]] = []
        for argv in commands:
            processes.append(
                _start(argv, processes, last=argv is commands[-1], log=log.fileno(), cwd=cwd)
            )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise LabError(failure, log=str(log_path()))


def _start(
    argv: Sequence[str],
    before: Sequence[subprocess.Popen[bytes]],
    *,
    last: bool,
    log: int,
    cwd: Path | None,
) -> subprocess.Popen[bytes]:
    """One program of a pipeline."""
    source = before[-1].stdout if before else None
    process = subprocess.Popen(
        argv,
        stdin=source or subprocess.DEVNULL,
        stdout=log if last else subprocess.PIPE,
        stderr=log,
        cwd=cwd,
    )
    if source is not None:
        source.close()  # so that the program before gets SIGPIPE if this one ends early
    return process
