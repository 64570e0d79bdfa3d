"""Finding: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The result of a check in one word."""

    OK = "ok"
    WARNING = "warning"
    """It works, with a limit that a user should know."""
    PROBLEM = "problem"
    """Something does not work until it is mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: a line of the report."""

    status: Status
    subject: str
    """The thing that was examined, such as "library" or "mlx5_0 port 1"."""
    text: str
    mend: str = ""
    """The way to mend it; empty if the status is OK."""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.subject}: {self.text}"
        return f"{line}; {self.mend}" if self.mend else line


def ok(subject: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(Status.OK, subject, text)


def warning(subject: str, text: str, mend: str) -> Finding:
    """Return a finding about a limit."""
    return Finding(Status.WARNING, subject, text, mend)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(Status.PROBLEM, subject, text, mend)
