"""The tools of `make matrix`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import matrix


@pytest.mark.parametrize("compiler", ["gcc", "cc", None])
def test_a_script_ends_if_there_is_a_compiler(tmp_path: Path, compiler: str | None) -> None:
    if compiler is not None:
        (tmp_path / compiler).write_text("")
        (tmp_path / compiler).chmod(0o755)
    command = ["/bin/sh", "-ec", f"{matrix.NO_COMPILER}echo none"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    expected = (0, "none\n") if compiler is None else (1, f"{tmp_path / compiler}\n")
    assert (done.returncode, done.stdout) == expected
