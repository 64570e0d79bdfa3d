"""Failures of the lab: each prints one sentence, and the exit code is 125."""

import os
import sys
from pathlib import Path

from .conftest import environment, lab_run

FAILED = 125


def test_boot_timeout_is_reported(tmp_path: Path) -> None:
    done = lab_run("true", cwd=tmp_path, options=("--boot-timeout", "0.5"))
    first, log = done.stderr.decode().splitlines()
    assert first == "aiordma lab: the virtual machine did not boot within 0.5 s"
    assert done.returncode == FAILED
    assert log.startswith("aiordma lab: the log is in ")
    os.unlink(log.rpartition(" ")[2])


def test_guest_panic_is_reported(tmp_path: Path) -> None:
    done = lab_run("sh", "-c", "echo c >/proc/sysrq-trigger; sleep 60", cwd=tmp_path)
    first, log = done.stderr.decode().splitlines()
    assert first == (
        "aiordma lab: the virtual machine ended: Kernel panic - not syncing: sysrq triggered crash"
    )
    assert done.returncode == FAILED
    os.unlink(log.rpartition(" ")[2])


def test_missing_qemu_is_reported(tmp_path: Path) -> None:
    done = lab_run("true", cwd=tmp_path, env=environment(PATH=str(Path(sys.executable).parent)))
    assert done.stderr.decode() == (
        "aiordma lab: QEMU (qemu-system-x86_64) is not installed: run `aiordma lab setup`\n"
    )
    assert done.returncode == FAILED


def test_missing_kernel_is_reported(tmp_path: Path) -> None:
    options = ("--device", "both")
    done = lab_run(
        "true", cwd=tmp_path, options=options, env=environment(XDG_CACHE_HOME="/nowhere")
    )
    (sentence,) = done.stderr.decode().splitlines()
    assert sentence.endswith("run `aiordma lab setup`")
    assert "kernel" in sentence
    assert done.returncode == FAILED


def test_qemu_error_is_reported(tmp_path: Path) -> None:
    done = lab_run("true", cwd=tmp_path, options=("--memory", "plenty"))
    first, log = done.stderr.decode().splitlines()
    assert first.startswith("aiordma lab: the virtual machine ended unexpectedly: qemu")
    assert done.returncode == FAILED
    os.unlink(log.rpartition(" ")[2])
