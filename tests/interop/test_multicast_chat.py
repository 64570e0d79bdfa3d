"""The example multicast_chat.py, with three members in the group."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from helpers import ROOT, TIME_LIMIT, read_line

from aiordma.rdmacm import DeviceAddress

CHAT = (sys.executable, str(ROOT / "examples" / "multicast_chat.py"))


def start_chat(address: DeviceAddress, name: str) -> subprocess.Popen[str]:
    command = [*CHAT, address.host, "--name", name]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert read_line(process) == "in the group 239.17.18.19"
    return process


def type_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@pytest.mark.transport("IB")
def test_each_member_receives_the_lines_of_the_others(address: DeviceAddress) -> None:
    with contextlib.ExitStack() as stack:
        chats = [stack.enter_context(start_chat(address, name)) for name in ("ann", "bob", "eve")]
        for process in chats:
            stack.callback(process.kill)
        ann, bob, eve = chats
        type_line(ann, "hello")
        for other in (bob, eve):
            assert read_line(other) == f"{address.host}: ann: hello"
        type_line(bob, "hi ann")
        for other in (ann, eve):
            assert read_line(other) == f"{address.host}: bob: hi ann"
        for process in chats:
            output, errors = process.communicate(timeout=TIME_LIMIT)
            assert (output, errors, process.returncode) == ("", "", 0)


@pytest.mark.transport("IWARP")
def test_a_device_without_datagrams(address: DeviceAddress) -> None:
    done = subprocess.run(
        [*CHAT, address.host], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("multicast_chat: ")
    assert "no datagrams" in done.stderr
