"""Running a case under valgrind's callgrind, and reading what that writes down."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.instructions.device import PRELOADED
from benchmarks.instructions.program import ONCE, TWICE

ROOT = Path(__file__).parents[2]
NATIVE = f"{ROOT}/aiordma/_native/"
# The library's other threads wait for work; one looks up whenever the system's devices change.
_MAIN_THREAD = "-01"
PROGRAM = "benchmarks.instructions.program"
# Of Python's own variables those that say where modules are; others change what is executed.
_KEPT_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX")

_TRIGGER = re.compile(r"^desc: Trigger: Client Request: (\w+)$", re.MULTILINE)
_OBJECT = re.compile(r"^c?ob=\((\d+)\)(?: (.+))?$")
_COST = re.compile(r"^[+\-*\d]\S* (\d+)$")


class CountError(Exception):
    """Nothing could be counted."""


@dataclass(frozen=True)
class Count:
    """Instructions for one operation."""

    instructions: float
    native: float
    """Those of them in the library's own C code."""
    operations: int
    """So many were counted against twice as many."""


def find_valgrind() -> str:
    """The program.

    Raises:
        CountError: it is not installed.
    """
    found = shutil.which("valgrind")
    if found is None:
        raise CountError("valgrind, which counts, is not installed: apt install valgrind")
    return found


def count_case(name: str, count: int, library: Path, folder: Path) -> Count:
    """Count a case: twice `count` operations less `count` of them, so that no start-up is in it.

    `library` is the device without hardware; `folder` is for callgrind's files.

    Raises:
        CountError: valgrind is not installed, or the program failed.
    """
    output = folder / f"{name}.out"
    for old in folder.glob(f"{output.name}*"):
        old.unlink()
    command = [
        find_valgrind(),
        "--tool=callgrind",
        "--instr-atstart=no",
        "--separate-threads=yes",
        f"--callgrind-out-file={output}",
        "--quiet",
        *(sys.executable, "-m", PROGRAM, name, str(count)),
    ]
    done = subprocess.run(
        command, env=_environment(library), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CountError(f"{name} failed under callgrind:\n{done.stderr.strip()}")
    dumps = read_dumps([path.read_text() for path in folder.glob(f"{output.name}.*{_MAIN_THREAD}")])
    if not dumps.keys() >= {ONCE, TWICE}:
        raise CountError(f"callgrind wrote down nothing of {name}:\n{done.stderr.strip()}")
    once, twice = dumps[ONCE], dumps[TWICE]
    return Count(
        (twice.total() - once.total()) / count,
        (_native(twice) - _native(once)) / count,
        count,
    )


def _environment(library: Path) -> dict[str, str]:
    """This process's, but for what would make two runs differ."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") or name in _KEPT_VARIABLES
    }
    path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    return variables | {"PYTHONHASHSEED": "0", PRELOADED: str(library)}


def read_dumps(texts: list[str]) -> dict[str, Counter[str]]:
    """Instructions by the object file that they are in, of each dump under its name."""
    found = ((_TRIGGER.search(text), text) for text in texts)
    return {trigger[1]: by_object(text) for trigger, text in found if trigger is not None}


def by_object(text: str) -> Counter[str]:
    """Instructions of one dump, by object file. See "Callgrind Format Specification"."""
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    here = "???"
    is_call = False
    for line in text.splitlines():
        if line.startswith(("ob=", "cob=")) and (match := _OBJECT.match(line)):
            number, name = match.groups()
            names.setdefault(number, name)
            if line.startswith("ob="):
                here = names[number]
        elif line.startswith("calls="):
            is_call = True  # in the next line is the cost of what is called, which is counted there
        elif match := _COST.match(line):
            if not is_call:
                costs[here] += int(match[1])
            is_call = False
    return costs


def _native(costs: Counter[str]) -> int:
    return sum(cost for name, cost in costs.items() if name.startswith(NATIVE))
