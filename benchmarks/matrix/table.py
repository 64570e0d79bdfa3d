"""The table of results: a row for each system."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.matrix.log import Done

__all__ = ["TESTS", "Row", "print_table"]

VERSIONS = ("kernel", "rdma-core", "Python", "gcc")
TESTS = ("wheel", "installed kernel", "demo", "test")


@dataclass
class Row:
    """The results of one system."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """The reasons of what is not plain, for the lines below the table."""
    has_failed: bool = False

    def attempt(self, function: Callable[[Row], None]) -> None:
        """Call a function that adds results. An exception of it is a failure of the row only."""
        try:
            function(self)
        except Exception as error:
            traceback.print_exc()
            self.has_failed = True
            self.notes.append(f"{type(error).__name__}: {error}")

    def timed(self, test: str, run: Callable[[], Done], expected: str, part: str = "") -> None:
        """Run a command. Store if it passed, and its duration.

        It must exit with 0 and print `expected`. `part` says which part of the test it is.
        """
        began = time.monotonic()
        done = run()
        minutes = (time.monotonic() - began) / 60
        has_passed = done.returncode == 0 and expected in done.printed
        outcome = "passed" if has_passed else f"failed (exit {done.returncode})"
        counts = re.findall(r"(\d+ failed.*|\d+ passed.*?) in [\d.]+s", done.printed)
        result = f"{part}{outcome}, {minutes:.1f} min"
        self.store(test, result, has_failed=not has_passed, details=counts)

    def store(
        self, test: str, result: str, *, has_failed: bool = False, details: Sequence[str] = ()
    ) -> None:
        """Store a result, and print it with the details."""
        self.results[test] = result
        self.has_failed |= has_failed
        print(f"{self.name}: {test}: {result}", *details, sep="; ", flush=True)

    def cells(self) -> list[str]:
        """Return the row of the table."""
        versions = [self.versions.get(column, "") for column in VERSIONS]
        return [self.name, *versions, *(self.results.get(test, "") for test in TESTS)]


def print_table(rows: Sequence[Row]) -> None:
    """Print the results, and the notes below them."""
    table = [["system", *VERSIONS, *TESTS], *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join(padded).rstrip())
    for row in rows:
        for note in row.notes:
            print(f"{row.name}: {note}")
