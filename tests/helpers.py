"""What the tests on a device share: a connected pair, counts of what exists, and processes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import blocking
import loops
import pytest
from netlink import rdma_resources

import aiordma
from aiordma import Connection, ConnectionOptions, Listener
from aiordma.rdmacm import DeviceAddress

DEFAULT = ConnectionOptions()
# Everything here is ten times slower on an emulated processor, so nothing waits for less than this.
PATIENCE = 150


@dataclass(frozen=True)
class Pair:
    client: Connection
    server: Connection
    listener: Listener


@contextlib.asynccontextmanager
async def connected(
    address: DeviceAddress,
    client: ConnectionOptions = DEFAULT,
    server: ConnectionOptions = DEFAULT,
) -> AsyncIterator[Pair]:
    """Two connected ends on one device. Whatever the test left open is aborted afterwards."""
    async with aiordma.listen(address.host, 0, options=server) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect(*listener.local_address, options=client)
        far = await accepting
        try:
            yield Pair(near, far, listener)
        finally:
            near.abort()
            far.abort()
            await near.aclose()
            await far.aclose()


@dataclass(frozen=True)
class Census:
    """What exists: RDMA objects in the whole machine, file descriptors in this process.

    Protection domains are left out: librdmacm keeps one of its own for each device, and frees it
    only when it happens to put the last id of the device while nobody else uses the device.
    """

    rdma: dict[str, int]
    files: Counter[str]

    @classmethod
    def take(cls) -> Census:
        counts = {
            f"{device} {kind}": count
            for device, kinds in rdma_resources().items()
            for kind, count in kinds.items()
            if kind in ("cq", "qp", "cm_id", "mr", "srq")
        }
        return cls(counts, Counter(_open_files()))


def _open_files() -> Iterator[str]:
    """What each file descriptor of this process is; a socket's or pipe's number does not matter."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]


def wait_for_census(expected: Census, seconds: float = PATIENCE) -> Census:
    """Take the census until it is as expected (what is destroyed in the background takes a while)
    or time is up; returns the last one."""
    deadline = time.monotonic() + seconds
    gc.collect()
    while (now := Census.take()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def start_python(
    code: str, *arguments: str, under: tuple[str, ...] = (), stderr: int | None = None
) -> subprocess.Popen[str]:
    """A process of this interpreter that runs `code`; its standard output is a pipe.

    `under`: what to start it with, such as setpriv.
    """
    command = [*under, sys.executable, "-c", code, *arguments]
    with blocking.excused():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


async def end(process: subprocess.Popen[str]) -> None:
    """Kill it if it still runs. It ends when the kernel has cleared up after it."""
    process.kill()
    await loops.to_thread(process.communicate)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints; "" when it ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


ROOT = Path(__file__).parent.parent


def give_name(address: DeviceAddress, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name for an address: in the lab's own /etc/hosts, elsewhere from a resolver of ours."""
    name = f"rdma.example-{address.device}"
    if "AIORDMA_LAB" in os.environ:
        with Path("/etc/hosts").open("a") as hosts:
            hosts.write(f"\n{address.host} {name}\n")
    else:
        answer = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address.host, 0))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answer])
    return name


async def send_in_step(send: Callable[[bytes], Awaitable[None]], to: Connection) -> None:
    """For ever, but not faster than the messages come out of the buffers at the other end."""
    arrived = to.stats.messages_received
    while True:
        await send(b"too fast")
        arrived += 1
        while to.stats.messages_received < arrived and not to.closed:
            await loops.sleep(0.001)
