"""Run the README's two commands, and the wheel, on fresh systems: `make matrix`.

    python -m benchmarks.matrix [--only-wheel] [ROW...]

A row is one of these. Without arguments: the three systems, the four versions of CPython, 3.13t.

- bookworm, trixie, sid: Debian 12, 13 and unstable. debootstrap makes a minimal system, in which
  nothing is installed but apt and its dependencies. Each test begins with a fresh copy of it.
- 3.11, 3.12, 3.13, 3.14, or the path of an interpreter: the wheel and the unit tests, with an
  interpreter of this machine, from PATH or pyenv.
- 3.13t, 3.14t: the free-threaded build of that version, which is built the first time. It must be
  refused with the reason, or work.

Needs root: commands run under chroot, in mount and process namespaces of their own, so that nothing
of them is left. The output of everything is in build/matrix/ROW.log while it runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from benchmarks.matrix import debian, free_threaded, interpreters
from benchmarks.matrix.system import BUILD
from benchmarks.matrix.table import Row, print_table

DEFAULT = (*debian.SUITES, *interpreters.VERSIONS, "3.13t")


def main() -> int:
    """Test the rows. Return 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only-wheel", action="store_true", help="on Debian, test the wheel alone")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("run it as root: it uses chroot")
    BUILD.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for name in arguments.rows or DEFAULT:
            rows.append(Row(title(name)))
            test(rows[-1], name, arguments)
    finally:
        print_table(rows)
    return int(any(row.has_failed for row in rows))


def test(row: Row, name: str, arguments: argparse.Namespace) -> None:
    """Run the tests of a row."""
    log = BUILD / f"{name.strip('/').replace('/', '-')}.log"
    log.unlink(missing_ok=True)
    if name in debian.SUITES:
        row.attempt(functools.partial(debian.wheel, suite=name, log=log))
        if not arguments.only_wheel:
            row.attempt(functools.partial(debian.source, suite=name, log=log))
    elif name in free_threaded.SUITES:
        row.attempt(functools.partial(free_threaded.free_threaded, name=name, log=log))
    else:
        python = interpreters.find(name) if name in interpreters.VERSIONS else Path(name)
        if python is None:
            row.store("test", "not on this machine", has_failed=bool(arguments.rows))
        else:
            row.attempt(functools.partial(interpreters.interpreter, python=python, log=log))


def title(name: str) -> str:
    """Return the name of a row in the table."""
    if name in (*interpreters.VERSIONS, *free_threaded.SUITES):
        return f"CPython {name}"
    return debian.SUITES.get(name, name)


if __name__ == "__main__":
    sys.exit(main())
