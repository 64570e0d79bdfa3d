"""The free-threaded build of CPython: refused with the reason, or it works.

Debian has no package of it. Its source, as Debian archives it, is built once in a Debian system.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.matrix.log import Done, checked
from benchmarks.matrix.system import BUILD, MIRROR, ROOT, System, wheel_file
from benchmarks.matrix.table import Row

__all__ = ["SUITES", "Refusal", "free_threaded", "refusal", "store"]

SUITES = {"3.13t": "trixie", "3.14t": "sid"}
"""The versions that a suite has the source of."""

_PREFIX = "opt/free-threaded"
_BUILD = f"""
cd
apt-get install --yes --quiet --no-install-recommends \\
    gcc libc6-dev make xz-utils zlib1g-dev libffi-dev libssl-dev
test ! -e /{_PREFIX} || exit 0
echo "deb-src {MIRROR} {{suite}} main" >/etc/apt/sources.list.d/source.list
apt-get update --quiet
apt-get source --download-only python{{version}}
mkdir source
tar --extract --file python{{version}}_*.orig.tar.xz --directory source --strip-components=1
cd source
./configure --quiet --disable-gil --disable-test-modules --prefix=/{_PREFIX} OPT=-O1
make --quiet --jobs=2
make --quiet install
"""
_INSTALL = """
cd
/{prefix}/bin/python3 -m venv venv
venv/bin/pip install --quiet {wheel}
venv/bin/python -c "import aiordma"
"""
# pip refuses the wheel because of its tags. Its files must be refused, too.
_IMPORT = """
cd
venv/bin/python -m zipfile --extract {wheel} files
PYTHONPATH=files venv/bin/python -c "import aiordma"
"""
_DEMO = "cd ~/aiordma; make demo PYTHON=/{prefix}/bin/python3"

_SENTENCES = {
    "aiordma": r"aiordma does not support the free-threaded build of CPython[^\"\n]*",
    "cffi": r"CFFI does not support the free-threaded build of CPython.*",
    "pip": r"\S+\.whl is not a supported wheel on this platform\.",
}


class Refusal(NamedTuple):
    """The sentence with which a project refuses the interpreter."""

    project: str
    sentence: str


def refusal(printed: str) -> Refusal | None:
    """Return the first sentence that refuses the interpreter; None if there is none."""
    found = [
        (match.start(), Refusal(project, match.group()))
        for project, pattern in _SENTENCES.items()
        if (match := re.search(pattern, printed)) is not None
    ]
    return min(found)[1] if found else None


def store(row: Row, test: str, done: Done, part: str) -> None:
    """Store if the part of a test works, is refused, or fails."""
    if done.returncode == 0:
        row.store(test, f"{part}works")
        return
    refused = refusal(done.printed)
    if refused is None:
        row.store(test, f"{part}failed (exit {done.returncode})", has_failed=True)
        return
    row.store(test, f"{part}refused by {refused.project}")
    row.notes.append(f"{part.strip() or test} refused by {refused.project}: {refused.sentence}")


def free_threaded(row: Row, name: str, log: Path) -> None:
    """Try the wheel, its files, and `make demo` with a free-threaded interpreter."""
    system = System(SUITES[name], log)
    _provide(system, name)
    asked = system.run(f"/{_PREFIX}/bin/python3 -c 'import sys; print(sys.version.split()[0])'")
    row.versions["Python"] = checked(asked).printed.strip()
    shutil.copy(wheel_file(), system.top / "root")
    clone = ["git", "clone", "--quiet", str(ROOT), str(system.top / "root/aiordma")]
    subprocess.run(clone, check=True)
    for test, script, part in (
        ("wheel", _INSTALL, ""),
        ("demo", _DEMO, ""),
        ("test", _IMPORT, "import "),
    ):
        done = system.run(script.format(prefix=_PREFIX, wheel=wheel_file().name))
        store(row, test, done, part)


def _provide(system: System, name: str) -> None:
    """Put the interpreter into the system: from the cache, or built."""
    cache = BUILD / f"python{name}.tar"
    (system.top / _PREFIX).parent.mkdir(exist_ok=True)
    if cache.exists():
        subprocess.run(["tar", "-x", "-f", cache, "-C", system.top], check=True)
    version = name.rstrip("t")
    checked(system.run(_BUILD.format(suite=SUITES[name], version=version)))
    if not cache.exists():
        partial = cache.with_suffix(".partial")
        subprocess.run(["tar", "-c", "-f", partial, "-C", system.top, _PREFIX], check=True)
        partial.rename(cache)
