"""The wheel and the unit tests with a Python interpreter of this machine."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.matrix.log import checked, logged
from benchmarks.matrix.system import BUILD, ROOT, wheel_file
from benchmarks.matrix.table import Row

__all__ = ["VERSIONS", "find", "interpreter"]

VERSIONS = ("3.11", "3.12", "3.13", "3.14")

# C modules can be built for the interpreter, and it has the stable ABI.
_PROBE = """
import ensurepip, pathlib, sysconfig
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
"""
_WHEEL = """
{python} -m venv {venv}
{venv}/bin/pip install --quiet {wheel}
{venv}/bin/aiordma --version
"""


def find(version: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return an interpreter of a version such as "3.12": of PATH, or the newest of pyenv.

    None: there is none that C modules can be built for.
    """
    for path in _candidates(version, environ):
        # A command that pyenv has put into PATH need not work.
        probe = [str(path), "-c", _PROBE]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return path
    return None


def _candidates(version: str, environ: Mapping[str, str]) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        yield Path(on_path)
    pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(
        pyenv.glob(f"versions/{version}.*/bin/python{version}"), key=_numbers, reverse=True
    )


def _numbers(path: Path) -> list[int]:
    """Return the numbers in the version of an interpreter of pyenv."""
    return [int(number) for number in re.findall(r"\d+", path.parts[-3])]


def interpreter(row: Row, python: Path, log: Path) -> None:
    """Install the wheel with an interpreter, and run the unit tests with it in a clone."""
    version = checked(logged([python, "--version"], log)).printed.split()[1]
    row.versions["Python"] = version
    clone, venv = BUILD / f"python-{version}", BUILD / f"python-{version}-wheel"
    for directory in (clone, venv):
        shutil.rmtree(directory, ignore_errors=True)
    script = _WHEEL.format(python=python, venv=venv, wheel=wheel_file())
    install = ["sh", "-ec", script]
    row.timed("wheel", functools.partial(logged, install, log, cwd=BUILD), "aiordma ")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    test = ["make", "unit", f"PYTHON={python}"]
    row.timed("test", functools.partial(logged, test, log, cwd=clone), " passed", "unit tests ")
