"""Run the README's two commands, and the wheel, on fresh systems: `make matrix`.

    python -m benchmarks.matrix [--only-wheel] [SYSTEM...]

For each system, debootstrap makes a minimal one, in which nothing is installed but apt and its
dependencies. Each test begins with a fresh copy of it. Needs root: commands run under chroot, in
mount and process namespaces of their own, so that nothing of them is left. The output of everything
is in build/matrix/SYSTEM.log.

A system can also be the path of a Python interpreter: then the unit tests run with it, here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "matrix"
MIRROR = "http://deb.debian.org/debian"
SYSTEMS = {"bookworm": "Debian 12", "trixie": "Debian 13", "sid": "Debian unstable"}
CA_FILE = "/etc/ca-of-the-host.crt"
"""The file in the system with the certificates of this machine: pip needs those of a proxy."""

VERSIONS = """
echo "kernel: $(ls ~/.cache/aiordma/lab/kernels)"
echo "rdma-core: $(dpkg-query --show --showformat '${Version}' 'librdmacm1*')"
echo "Python: $(python3 --version | cut -d' ' -f2)"
echo "gcc: $(gcc -dumpfullversion 2>/dev/null)"
"""
SOURCE = "apt-get install --yes --quiet --no-install-recommends make"
# `! command` would not end a script under `sh -e`, and `command -v` looks at its first word only.
NO_COMPILER = """
for compiler in gcc cc c99 clang; do
    if command -v $compiler; then exit 1; fi
done
"""
# Without the libraries, imports work and the commands name the packages. QEMU needs librdmacm1, so
# the lab installs it.
WHEEL = f"""
cd
apt-get install --yes --quiet --no-install-recommends python3 python3-venv
python3 -m venv venv
venv/bin/pip install --quiet {{wheel}}
for command in devices doctor; do
    if venv/bin/aiordma $command >printed 2>&1; then exit 1; fi
    grep "install the packages librdmacm1 and ibverbs-providers" printed
    if grep Traceback printed; then exit 1; fi
done
venv/bin/aiordma lab setup --device rxe
apt-get install --yes --quiet --no-install-recommends librdmacm1 ibverbs-providers
venv/bin/aiordma lab run -- venv/bin/python examples/demo.py
venv/bin/aiordma lab run -- venv/bin/aiordma doctor
{NO_COMPILER}"""


@dataclass
class Row:
    """The results of one system."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False

    def cells(self) -> list[str]:
        """Return the row of the table."""
        columns = ("kernel", "rdma-core", "Python", "gcc")
        versions = [self.versions.get(column, "") for column in columns]
        return [self.name, *versions, *(self.results.get(test, "") for test in TESTS)]


TESTS = ("wheel", "demo", "test")
HEADERS = ("system", "kernel", "rdma-core", "Python", "gcc", *TESTS)


class System:
    """A fresh minimal Debian system, in a directory of its own."""

    def __init__(self, suite: str) -> None:
        """Make the system. The first time, debootstrap downloads its packages."""
        self.suite = suite
        self.top = BUILD / suite
        self.log = BUILD / f"{suite}.log"
        base = BUILD / f"base-{suite}"
        if not base.exists():
            partial = base.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", suite, str(partial), MIRROR]
            with self.log.open("ab") as log:
                subprocess.run(command, check=True, stdout=log, stderr=log)
            partial.rename(base)
        shutil.rmtree(self.top, ignore_errors=True)
        subprocess.run(["cp", "--archive", base, self.top], check=True)
        shutil.copy("/etc/resolv.conf", self.top / "etc/resolv.conf")
        if "PIP_CERT" in os.environ:
            shutil.copy(os.environ["PIP_CERT"], f"{self.top}{CA_FILE}")
        # A mirror of unstable can be older than its Release file allows.
        settings = self.top / "etc/apt/apt.conf.d/99matrix"
        settings.write_text('Acquire::Check-Valid-Until "false";\n')

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script as root in the system. Its output is appended to the log."""
        variables = {
            "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
            "CI": "true",
        }
        if "PIP_CERT" in os.environ:
            variables["PIP_CERT"] = CA_FILE
        words = [f"{name}={value}" for name, value in variables.items()]
        inside = ["env", "-i", *words, "sh", "-ec", script]
        enter = (
            f"cd {shlex.quote(str(self.top))}\n"
            "mount --rbind /dev dev; mount -t proc proc proc; mount -t sysfs sysfs sys\n"
            f"exec chroot . {shlex.join(inside)}"
        )
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", enter]
        done = subprocess.run(namespaces, capture_output=True, text=True, check=False)
        with self.log.open("a") as log:
            log.write(f"$ {script}\n{done.stdout}{done.stderr}")
        return done


def test_wheel(row: Row, suite: str) -> None:
    """Install the wheel where there is no compiler, and echo with it in the lab."""
    wheel = next((ROOT / "dist").glob("*.whl"))
    system = System(suite)
    shutil.copy(wheel, system.top / "root")
    shutil.copytree(ROOT / "examples", system.top / "root/examples")
    system.run("apt-get update --quiet")
    timed(row, "wheel", system, WHEEL.format(wheel=wheel.name), "demo: the echo was right")


def test_source(row: Row, suite: str) -> None:
    """Run the README's two commands in a clone."""
    system = System(suite)
    clone = ["git", "clone", "--quiet", str(ROOT), str(system.top / "root/aiordma")]
    subprocess.run(clone, check=True)
    system.run(f"apt-get update --quiet; {SOURCE}")
    timed(row, "demo", system, "cd ~/aiordma; make demo", "demo: the echo was right")
    timed(row, "test", system, "cd ~/aiordma; make test", " passed")
    printed = system.run(VERSIONS).stdout
    row.versions |= dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)


def timed(row: Row, test: str, system: System, script: str, expected: str) -> None:
    """Run a script, and store in the row if it passed and how long it took."""
    began = time.monotonic()
    done = system.run(script)
    minutes = (time.monotonic() - began) / 60
    has_passed = done.returncode == 0 and expected in done.stdout
    counts = re.findall(r"(\d+ failed.*|\d+ passed.*?) in [\d.]+s", done.stdout)
    outcome = "passed" if has_passed else f"failed (exit {done.returncode})"
    row.results[test] = f"{outcome}, {minutes:.1f} min"
    row.has_failed |= not has_passed
    print(f"{row.name}: {test} {row.results[test]} {counts}", flush=True)


def test_python(row: Row, python: str) -> None:
    """Run the unit tests with an interpreter, in a clone; or show that it is refused."""
    asked = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    row.versions["Python"] = asked.stdout.split()[1]
    clone = BUILD / f"python-{row.versions['Python']}"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    began = time.monotonic()
    done = subprocess.run(
        ["make", "unit", f"PYTHON={python}"], cwd=clone, capture_output=True, text=True, check=False
    )
    (BUILD / f"{clone.name}.log").write_text(done.stdout + done.stderr)
    minutes = (time.monotonic() - began) / 60
    refused = re.search(r"aiordma does not support .*? build of CPython", done.stdout + done.stderr)
    if refused is not None:
        row.results["test"] = "refused, with the reason"
        return
    row.has_failed = done.returncode != 0
    outcome = "failed" if row.has_failed else "passed"
    row.results["test"] = f"unit tests {outcome}, {minutes:.1f} min"
    print(f"{row.name}: {row.results['test']}", flush=True)


def print_table(rows: Sequence[Row]) -> None:
    """Print the results."""
    table = [list(HEADERS), *(row.cells() for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(HEADERS))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))


def main() -> int:
    """Test the systems. Return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only-wheel", action="store_true", help="test the wheel alone")
    parser.add_argument("systems", nargs="*", default=[*SYSTEMS], metavar="SYSTEM")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("run it as root: it uses chroot")
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.systems:
        row = Row(SYSTEMS.get(name, name))
        rows.append(row)
        if name not in SYSTEMS:
            test_python(row, name)
            continue
        test_wheel(row, name)
        if not arguments.only_wheel:
            test_source(row, name)
    print_table(rows)
    return int(any(row.has_failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
