"""callgrind: run a case under it, and read its dumps."""

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
# The library's other threads wait for work. One of them runs when devices of the system change.
_MAIN_THREAD = "-01"
PROGRAM = "benchmarks.instructions.program"
TIME_LIMIT = 600  # seconds for a case
# The variables of Python that set where modules are found. Others would change what is executed.
_PATH_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX")

_TRIGGER = re.compile(r"^desc: Trigger: Client Request: (\w+)$", re.MULTILINE)
_OBJECT = re.compile(r"^c?ob=\((\d+)\)(?: (.+))?$")
_COST = re.compile(r"^[+\-*\d]\S* (\d+)$")


class CountError(Exception):
    """The reason why a case could not be counted."""


@dataclass(frozen=True)
class Count:
    """The instructions of one operation."""

    instructions: float
    native: float
    """The part of them in the C code of aiordma."""
    operations: int
    """The number of operations in the shorter of the two runs."""


def find_valgrind() -> str:
    """Return the path of valgrind.

    Raises:
        CountError: valgrind is not installed.
    """
    found = shutil.which("valgrind")
    if found is None:
        raise CountError("valgrind is not installed: apt install valgrind")
    return found


def count_case(name: str, count: int, library: Path, folder: Path) -> Count:
    """Count the instructions of one operation of a case.

    That is a run of twice `count` operations minus a run of `count` operations, divided by
    `count`: work that is done once is in both and cancels out. `library` is the device without
    hardware; callgrind writes its files to `folder`.

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
    try:
        done = subprocess.run(
            command,
            env=_environment(library),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise CountError(f"{name} did not end within {TIME_LIMIT} seconds") from error
    if done.returncode:
        raise CountError(f"{name} failed under callgrind:\n{done.stderr.strip()}")
    dumps = read_dumps([path.read_text() for path in folder.glob(f"{output.name}.*{_MAIN_THREAD}")])
    if not dumps.keys() >= {ONCE, TWICE}:
        raise CountError(f"callgrind wrote no dumps of {name}:\n{done.stderr.strip()}")
    once, twice = dumps[ONCE], dumps[TWICE]
    return Count(
        (twice.total() - once.total()) / count,
        (_native(twice) - _native(once)) / count,
        count,
    )


def _environment(library: Path) -> dict[str, str]:
    """Return this process's environment without the variables that would make runs differ."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") or name in _PATH_VARIABLES
    }
    path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    return variables | {"PYTHONHASHSEED": "0", PRELOADED: str(library)}


def read_dumps(texts: list[str]) -> dict[str, Counter[str]]:
    """Return the instructions by object file, for each dump by its name."""
    found = ((_TRIGGER.search(text), text) for text in texts)
    return {trigger[1]: count_by_object(text) for trigger, text in found if trigger is not None}


def count_by_object(text: str) -> Counter[str]:
    """Return the instructions of one dump by object file.

    The format is in valgrind's manual, "Callgrind Format Specification".
    """
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    current = "???"
    is_call = False
    for line in text.splitlines():
        if line.startswith(("ob=", "cob=")) and (match := _OBJECT.match(line)):
            number, name = match.groups()
            names.setdefault(number, name)
            if line.startswith("ob="):
                current = names[number]
        elif line.startswith("calls="):
            is_call = True  # the next line has the cost of the callee, which is counted there
        elif match := _COST.match(line):
            if not is_call:
                costs[current] += int(match[1])
            is_call = False
    return costs


def _native(costs: Counter[str]) -> int:
    return sum(cost for name, cost in costs.items() if name.startswith(NATIVE))
