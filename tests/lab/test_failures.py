"""Failures of the lab: each prints one sentence, and the exit code is 125."""

import os
import re
import sys
from pathlib import Path

import pytest

from .conftest import environment, lab_run

PANIC = ("sh", "-c", "echo c >/proc/sysrq-trigger; sleep 60")


@pytest.mark.parametrize(
    ("sentence", "options", "command", "variables"),
    [
        (
            "the virtual machine did not boot within 0.5 s$",
            ("--boot-timeout", "0.5"),
            ("true",),
            {},
        ),
        ("the virtual machine ended: Kernel panic - .*: sysrq triggered crash$", (), PANIC, {}),
        ("the virtual machine ended unexpectedly: qemu", ("--memory", "plenty"), ("true",), {}),
        (
            r"QEMU \(qemu-system-x86_64\) is not installed: run `aiordma lab setup`$",
            *((), ("true",), {"PATH": str(Path(sys.executable).parent)}),
        ),
        (
            ".*kernel.*run `aiordma lab setup`$",
            *(("--device", "both"), ("true",), {"XDG_CACHE_HOME": "/nowhere"}),
        ),
    ],
)
def test_a_failure_is_one_sentence(
    tmp_path: Path,
    sentence: str,
    options: tuple[str, ...],
    command: tuple[str, ...],
    variables: dict[str, str],
) -> None:
    done = lab_run(*command, cwd=tmp_path, options=options, env=environment(**variables))
    first, *more = done.stderr.decode().splitlines()
    assert re.match(f"aiordma lab: {sentence}", first), first
    assert done.returncode == 125
    assert len(more) == ("virtual machine" in sentence)
    for log in more:
        assert log.startswith("aiordma lab: the log is in ")
        os.unlink(log.rpartition(" ")[2])
