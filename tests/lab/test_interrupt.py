"""Ctrl-C, signals, and a lab that dies."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import Start, children, environment, is_running, lab_run

PATIENT = 'trap "echo interrupted; exit 5" INT; echo ready; while :; do sleep 0.1; done'
STUBBORN = 'trap "echo interrupted" INT; echo ready; while :; do sleep 0.1; done'


def read_until(fd: int, wanted: bytes, limit: float = 150) -> bytes:
    """Read until `wanted` has come; returns everything."""
    got = b""
    deadline = time.monotonic() + limit
    while wanted not in got:
        assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], got
        data = os.read(fd, 4096)
        assert data, got
        got += data
    return got


def test_terminal_with_ctrl_c(start: Start) -> None:
    ours, theirs = pty.openpty()
    process = start(
        "sh", "-c", "stty size; tty -s && echo terminal; " + PATIENT,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert b"terminal\r\n" in read_until(ours, b"ready\r\n")
    os.write(ours, b"\x03")
    read_until(ours, b"interrupted\r\n")
    assert process.wait(60) == 5
    os.close(ours)


def test_interrupt_without_a_terminal_and_an_impatient_one(start: Start) -> None:
    process = start("sh", "-c", STUBBORN)
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"ready\n")
    (qemu,) = children(process.pid)

    process.send_signal(signal.SIGINT)
    read_until(process.stdout.fileno(), b"interrupted\n")
    time.sleep(2.5)  # patience: this is a new first one
    assert process.poll() is None
    interrupt_again_and_again(process)

    assert process.wait(60) == 128 + signal.SIGINT
    assert not is_running(qemu)


def interrupt_again_and_again(process: subprocess.Popen[bytes]) -> None:
    """As who has no patience. A single second one may come too late on a busy machine."""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.5)
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_by_signal_leaves_no_process(start: Start, number: signal.Signals) -> None:
    process = start("sh", "-c", STUBBORN)
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"ready\n")
    (qemu,) = children(process.pid)

    process.send_signal(number)

    code = process.wait(60)
    assert code == (128 + number if number == signal.SIGTERM else -number)
    wait_until_gone(qemu)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = lab_run("true", cwd=tmp_path, env=environment(TMPDIR=str(scratch)))
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(scratch.iterdir()) == []
