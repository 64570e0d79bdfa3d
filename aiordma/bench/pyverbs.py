"""pyverbs: where it is installed, and how its script is run."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from functools import cache
from pathlib import Path

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample, latency_sample

SCRIPT = Path(__file__).parent / "workers" / "pyverbs_latency.py"


@cache
def interpreter() -> str | None:
    """A Python that has pyverbs: this one, or the system's, for which distributions build it."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            found = subprocess.run(
                [python, "-c", "import pyverbs.cmid"], capture_output=True, check=False
            )
        except OSError:
            continue
        if found.returncode == 0:
            return python
    return None


def command(work: Work, role: str, host: str, port: int, kind: str) -> list[str]:
    """A command line; `kind` is blocking or polling."""
    numbers = [str(number) for number in (work.size, work.count, work.warmup)]
    return [interpreter() or sys.executable, str(SCRIPT), role, host, str(port), *numbers, kind]


def parse(output: str) -> Sample:
    """What the client says.

    Raises:
        ValueError: it says nothing.
    """
    found = json.loads(output)
    return latency_sample(array("q", found["times"]), float(found["cpu"]))
