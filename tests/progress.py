"""A pytest plugin for long runs: it prints the progress, with an estimate of the time left.

It replaces the dots of passed tests. Failures are printed at once, with their names.
"""

from __future__ import annotations

import time

import pytest
from xdist.workermanage import NodeManager

INTERVAL = 20.0
"""Seconds between two lines."""


def seconds_left(elapsed: float, done: int, total: int) -> float:
    """Estimate the seconds that the rest takes if it is as fast as the part that is done."""
    return elapsed / done * (total - done)


def in_words(seconds: float) -> str:
    """Return a duration in minutes and seconds, for example "3 min 20 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Progress:
    """Counts the tests that are done. The time begins with the first test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: pytest.Session | None = None
        self._done: set[str] = set()
        self._failed = 0
        self._began = self._printed = 0.0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        """Print no letter for a test that passed."""
        if report.passed:
            return ("passed" if report.when == "call" else "", "", "")
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and print a line if the last one is old enough."""
        now = time.monotonic()
        self._began = self._began or now - report.duration
        self._printed = self._printed or self._began
        if report.failed:
            self._failed += 1
            self._write(f"FAILED {report.nodeid} ({report.when})")
        if report.when == "teardown":
            self._done.add(report.nodeid)
        if now - self._printed >= INTERVAL and self._done:
            self._printed = now
            self._write(self._line(now))

    def _line(self, now: float) -> str:
        done = len(self._done)
        total = max(done, self._session.testscollected if self._session is not None else 0)
        left = in_words(seconds_left(now - self._began, done, total))
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{done} of {total} tests{failed}, about {left} left"

    def _write(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    # A worker that is killed while it ends stores no coverage of C. It may take longer than 10 s.
    NodeManager.EXIT_TIMEOUT = 600
    config.pluginmanager.register(Progress(config), "aiordma-progress")
