"""Run the README's two commands, and the wheel, on fresh systems: `make matrix`.

    python -m benchmarks.matrix [--only-wheel] [SYSTEM...]

For each system, debootstrap makes a minimal one, in which nothing is installed but apt and its
dependencies. Each test begins with a fresh copy of it. Needs root: commands run under chroot, in
mount and process namespaces of their own, so that nothing of them is left. The output of everything
is in build/matrix/SYSTEM.log while it runs.

A system can also be the path of a Python interpreter: then the wheel is installed and the unit
tests run with it, here.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from benchmarks.matrix import debian, interpreters
from benchmarks.matrix.system import BUILD
from benchmarks.matrix.table import Row, print_table


def main() -> int:
    """Test the systems. Return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only-wheel", action="store_true", help="test the wheel alone")
    parser.add_argument("systems", nargs="*", default=[*debian.SUITES], metavar="SYSTEM")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("run it as root: it uses chroot")
    BUILD.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for name in arguments.systems:
            rows.append(Row(debian.SUITES.get(name, name)))
            run_tests(rows[-1], name, only_wheel=arguments.only_wheel)
    finally:
        print_table(rows)
    return int(any(row.has_failed for row in rows))


def run_tests(row: Row, name: str, *, only_wheel: bool) -> None:
    """Run the tests of a system or of an interpreter."""
    log = BUILD / f"{name.strip('/').replace('/', '-')}.log"
    log.unlink(missing_ok=True)
    if name not in debian.SUITES:
        row.attempt(functools.partial(interpreters.interpreter, python=Path(name), log=log))
        return
    row.attempt(functools.partial(debian.wheel, suite=name, log=log))
    if not only_wheel:
        row.attempt(functools.partial(debian.source, suite=name, log=log))


if __name__ == "__main__":
    sys.exit(main())
