"""Run a command whose output can be followed in a log."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Done", "checked", "logged"]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    printed: str
    """Its output and its errors, in their order."""


def logged(
    command: Sequence[str | Path],
    log: Path,
    *,
    title: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run a command. It writes its output to the end of the log itself, after a line `title`."""
    with log.open("ab") as file:
        file.write(f"$ {title or ' '.join(map(str, command))}\n".encode())
        file.flush()
        begin = file.tell()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            cwd=cwd,
            env=env,
        )
    with log.open("rb") as file:
        file.seek(begin)
        return Done(done.returncode, file.read().decode(errors="replace"))


def checked(done: Done) -> Done:
    """Return `done`.

    Raises: RuntimeError with the last line that the command printed, if it failed.
    """
    if done.returncode != 0:
        last = done.printed.strip().rpartition("\n")[2]
        raise RuntimeError(f"exit {done.returncode}: {last}")
    return done
