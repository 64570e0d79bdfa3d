"""A hundred programs of the simulated campaign. `make soak` runs as many as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEEDS = 100
BATCH = 10


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_programs_of_random_operations_keep_the_rules(first: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulator.campaign", str(first), str(BATCH)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
