"""Ctrl-C and signals to the lab, and the lab's sudden end."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import time

import pytest

from .conftest import Start, children, is_running, wait_until

ENDS_ON_SIGINT = 'trap "echo interrupted; exit 5" INT; echo ready; while :; do sleep 0.1; done'
IGNORES_SIGINT = 'trap "echo interrupted" INT; echo ready; while :; do sleep 0.1; done'


def read_until(fd: int, wanted: bytes, limit: float = 150) -> bytes:
    """Read until `wanted` has arrived. Return all bytes read."""
    got = b""
    deadline = time.monotonic() + limit
    while wanted not in got:
        assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], got
        data = os.read(fd, 4096)
        assert data, got
        got += data
    return got


def test_ctrl_c_in_a_terminal_interrupts_the_command(start: Start) -> None:
    ours, theirs = pty.openpty()
    process = start(
        "sh", "-c", "stty size; tty -s && echo terminal; " + ENDS_ON_SIGINT,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert b"terminal\r\n" in read_until(ours, b"ready\r\n")
    os.write(ours, b"\x03")
    read_until(ours, b"interrupted\r\n")
    assert process.wait(600) == 5
    os.close(ours)


def test_one_sigint_goes_to_the_command_and_two_in_a_row_end_the_lab(start: Start) -> None:
    process = start("sh", "-c", IGNORES_SIGINT)
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"ready\n")
    (qemu,) = children(process.pid)

    process.send_signal(signal.SIGINT)
    read_until(process.stdout.fileno(), b"interrupted\n")
    time.sleep(2.5)  # longer than the limit: the next SIGINT counts as a first one
    process.send_signal(signal.SIGINT)
    read_until(process.stdout.fileno(), b"interrupted\n")
    interrupt_until_it_ends(process)

    assert process.wait(600) == 128 + signal.SIGINT
    assert not is_running(qemu)


def interrupt_until_it_ends(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT repeatedly. On a busy machine a single second one can arrive too late."""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.5)
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_lab_leaves_no_process(start: Start, number: signal.Signals) -> None:
    process = start("sh", "-c", IGNORES_SIGINT)
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"ready\n")
    (qemu,) = children(process.pid)

    process.send_signal(number)

    code = process.wait(600)
    assert code == (128 + number if number == signal.SIGTERM else -number)
    wait_until(lambda: not is_running(qemu))
