"""The tests on a Debian system: the wheel without a compiler, and the README's two commands."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from benchmarks.matrix.system import ROOT, System, wheel_file
from benchmarks.matrix.table import Row

__all__ = ["SUITES", "source", "wheel"]

SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13", "sid": "Debian unstable"}

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
INSTALLED_KERNEL = """
cd
rm -r ~/.cache/aiordma
apt-get install --yes --quiet --no-install-recommends linux-image-amd64
venv/bin/aiordma lab run -- venv/bin/python examples/demo.py
test ! -e ~/.cache/aiordma/lab/kernels
"""


def wheel(row: Row, suite: str, log: Path) -> None:
    """Install the wheel where there is no compiler, and echo with it in the lab.

    The lab boots first the kernel that it has unpacked, then one that is installed.
    """
    system = System(suite, log)
    shutil.copy(wheel_file(), system.top / "root")
    shutil.copytree(ROOT / "examples", system.top / "root/examples")
    for test, script in (
        ("wheel", WHEEL.format(wheel=wheel_file().name)),
        ("installed kernel", INSTALLED_KERNEL),
    ):
        row.timed(test, functools.partial(system.run, script), "demo: the echo was right")


def source(row: Row, suite: str, log: Path) -> None:
    """Run the README's two commands in a clone."""
    system = System(suite, log)
    clone = ["git", "clone", "--quiet", str(ROOT), str(system.top / "root/aiordma")]
    subprocess.run(clone, check=True)
    system.run("apt-get install --yes --quiet --no-install-recommends make")
    for command, expected in (("demo", "demo: the echo was right"), ("test", " passed")):
        script = f"cd ~/aiordma; make {command}"
        row.timed(command, functools.partial(system.run, script), expected)
    printed = system.run(VERSIONS).printed
    row.versions |= dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
