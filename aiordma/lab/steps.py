"""The long steps of setup: one printed line for each, and a log for the output of programs."""

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

__all__ = ["command", "log_path", "pipeline", "show", "step"]


def log_path() -> Path:
    """Return the path of the log, with the output of apt, tar and the compiler."""
    return cache_dir() / "setup.log"


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Print a line with the block's result and duration. On a terminal, count the seconds."""
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
        show(f"{start_of_line}lab: {what}: {result} in {seconds:.0f} s\n")


def show(text: str) -> None:
    """Print a text on standard error, and flush it."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _tick(what: str, started: float, done: threading.Event) -> None:
    while not done.wait(0.5):
        seconds = time.monotonic() - started
        show(f"\rlab: {what} ... {seconds:.0f} s")


def command(argv: Sequence[str], failure: str, *, cwd: Path | None = None) -> None:
    """Run a program. Its output goes to the log.

    Raises: LabError with the sentence `failure` if it fails.
    """
    pipeline([argv], failure, cwd=cwd)


def pipeline(commands: Sequence[Sequence[str]], failure: str, *, cwd: Path | None = None) -> None:
    """Run programs, each with the previous one's output as its input.

    The output of the last one goes to the log, and so do all errors.

    Raises: LabError with the sentence `failure` if one of them fails.
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
    """Start one program of a pipeline."""
    source = before[-1].stdout if before else None
    process = subprocess.Popen(
        argv,
        stdin=source or subprocess.DEVNULL,
        stdout=log if last else subprocess.PIPE,
        stderr=log,
        cwd=cwd,
    )
    if source is not None:
        source.close()  # so that the previous program gets SIGPIPE if this one ends early
    return process
