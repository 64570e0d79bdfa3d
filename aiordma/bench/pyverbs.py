"""pyverbs: find the Python that has it, command lines and output of workers/pyverbs_latency.py."""

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
    """Return a Python that has pyverbs, or None.

    It is this one or the system's, for which distributions build pyverbs.
    """
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
    """Return a command line; `kind` is blocking or polling."""
    numbers = [str(number) for number in (work.size, work.count, work.warmup)]
    return [interpreter() or sys.executable, str(SCRIPT), role, host, str(port), *numbers, kind]


def parse(output: str) -> Sample:
    """Return the sample of the times that the client prints.

    Raises:
        ValueError: the output has none.
    """
    found = json.loads(output)
    return latency_sample(array("q", found["times"]), float(found["cpu"]))
