"""A hundred programs of the simulated campaign. `make soak` runs as many as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.mistakes import MISTAKES, ROOT, Mistake

TESTS = Path(__file__).parents[1]


def test_programs_of_random_operations_keep_the_rules() -> None:
    command = [sys.executable, "-m", "simulator.campaign", "0", "100"]
    variables = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_each_mistake_can_be_made(mistake: Mistake) -> None:
    """The text that it replaces is in the library, once."""
    assert (ROOT / mistake.file).read_text().count(mistake.right) == 1
