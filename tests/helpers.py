"""Helpers of the tests on a device: connected pairs, counts of resources, and processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import blocking
import loops
import pytest
from netlink import rdma_resources

import aiordma
from aiordma import (
    AccessFlags,
    AsyncCmId,
    Connection,
    ConnectionOptions,
    Listener,
    PeerClosed,
    WcStatus,
    WorkRequestError,
)
from aiordma.cm import CmState
from aiordma.cm.accepting import BaseListener
from aiordma.cm.base_id import BaseCmId
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, parse_address

DEFAULT = ConnectionOptions()
SHARED = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
"""The access of memory that the peer can read and write."""
# The time limit of waits, in seconds. On an emulated processor everything is ten times slower.
TIME_LIMIT = 150


class Host(Protocol):
    """A DeviceAddress, or a simulated device."""

    @property
    def host(self) -> str: ...


@dataclass(frozen=True)
class Pair:
    """Two connected ends, and the listener."""

    client: Connection
    server: Connection
    listener: Listener


@contextlib.asynccontextmanager
async def connected(
    address: Host,
    client: ConnectionOptions = DEFAULT,
    server: ConnectionOptions = DEFAULT,
    port: int = 0,
) -> AsyncIterator[Pair]:
    """Connect two ends. After the block, abort those that are still open."""
    async with aiordma.listen(address.host, port, options=server) as listener:
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


@contextlib.contextmanager
def access_refused() -> Iterator[None]:
    """Expect that the peer's device refuses an access in the block, which ends the connection.

    Two things tell this side: the refusal, and the disconnect of the peer. They come by different
    queue pairs of the kernel, and on a busy machine the disconnect can be seen first.
    """
    with pytest.raises((WorkRequestError, PeerClosed)) as raised:
        yield
    if isinstance(raised.value, WorkRequestError):
        assert raised.value.status is WcStatus.REM_ACCESS_ERR


async def echo(connection: Connection) -> None:
    """Send each message back."""
    async for message in connection:
        await connection.send(message)


@contextlib.asynccontextmanager
async def serving(
    address: Host,
    handler: Callable[[Connection], Awaitable[object]] = echo,
    options: ConnectionOptions = DEFAULT,
) -> AsyncIterator[Listener]:
    """Run `handler` for each peer. At the end of the block, wait until all handlers have ended."""
    async with aiordma.listen(address.host, 0, options=options) as listener:
        task = loops.create_task(listener.serve(handler))
        yield listener
        await listener.aclose()
        await task


async def unconfirmed_peer(host: str, port: int, private_data: bytes = b"") -> AsyncCmId:
    """Return an id that asked to connect and never confirms the reply. Impossible on iWARP."""
    cm_id = await AsyncCmId.create()
    await cm_id.resolve_addr(parse_address(host, port))
    await cm_id.resolve_route()
    await cm_id.connect(ConnectionParameters(private_data, qp_num=17))
    assert cm_id.state is CmState.RESPONDED
    return cm_id


@dataclass(frozen=True)
class ResourceSnapshot:
    """The number of RDMA objects on this machine and of file descriptors of this process.

    Protection domains are not counted. librdmacm allocates one for each device. It frees that only
    if its last id of the device is destroyed while the device has no other user.
    """

    rdma: dict[str, int]
    files: Counter[str]

    @classmethod
    def take(cls) -> ResourceSnapshot:
        """Count the resources that exist now."""
        counts = {
            f"{device} {kind}": count
            for device, kinds in rdma_resources().items()
            for kind, count in kinds.items()
            if kind in ("cq", "qp", "cm_id", "mr", "srq")
        }
        return cls(counts, Counter(_open_files()))


def _open_files() -> Iterator[str]:
    """Yield the target of each file descriptor, without the numbers of sockets and pipes."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of listdir() itself
            yield os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]


def wait_for_snapshot(expected: ResourceSnapshot, seconds: float = TIME_LIMIT) -> ResourceSnapshot:
    """Count resources until the counts are as expected, or until the timeout.

    Some resources are destroyed in the background, which takes a while. Return the last snapshot.
    """
    deadline = time.monotonic() + seconds
    gc.collect()
    while (now := ResourceSnapshot.take()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


# --- what has happened so far: conditions for loops.until() ---


def is_receiving(*connections: Connection) -> bool:
    """Return True if on each of these connections a task waits for a message."""
    return all(each._endpoint.data_path.receiver.is_waited_for for each in connections)


def has_waiter(cm: BaseCmId) -> bool:
    """Return True if a task waits for an event or a completion of an id.

    If the wait is in a worker thread, the thread has begun to wait, and no cancellation has ended
    the wait.
    """
    on_loop = isinstance(cm, AsyncCmId) and len(cm._changed) > 0
    return on_loop or any(not interrupt.is_set for interrupt in cm.handle.interrupts)


def is_accepting(listener: BaseListener[Any, Any]) -> bool:
    """Return True if a task waits for the next request at a listener."""
    return len(listener._arrived) > 0


def pending_requests(listener: BaseListener[Any, Any]) -> int:
    """Return the number of requests that have arrived at a listener and that no task has taken."""
    return sum(cm.requests_waiting for cm in listener._cms)


def has_pending_event(cm: BaseCmId) -> bool:
    """Return True if a request waits in an id that listens, or an event in an id's own channel.

    No loop reads the channel of a synchronous id. Its events stay in the kernel until a call
    needs them.
    """
    channels = cm.event_fds()
    return bool(cm._requests or (channels and select.select(channels, [], [], 0)[0]))


def cm_ids(device: str) -> int:
    """Return the number of rdma_cm ids that are bound to a device, in all processes."""
    return rdma_resources()[device]["cm_id"]


def can_be_resized(buffer: bytearray) -> bool:
    """Append a byte to a buffer. Return False if a registration exports the buffer."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


# --- processes ---


def run_program(*command: str) -> str:
    """Run a program in this thread until it ends, without an error. Return what it prints."""
    with blocking.allowed():
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start_python(
    code: str, *arguments: str, under: tuple[str, ...] = (), stderr: int | None = None
) -> subprocess.Popen[str]:
    """Start a process of this interpreter that runs `code`. Its standard output is a pipe.

    `under` is a command to start it with, such as setpriv.
    """
    command = [*under, sys.executable, "-c", code, *arguments]
    with blocking.allowed():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


async def end(process: subprocess.Popen[str]) -> None:
    """Kill a process if it still runs. Return when the kernel has released its resources."""
    process.kill()
    await loops.to_thread(process.communicate)


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints; "" if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def host_name(address: DeviceAddress) -> Iterator[str]:
    """Define a host name for an address in the block, and return it.

    In the lab it is added to /etc/hosts, and stays there. Elsewhere getaddrinfo() is replaced.
    """
    name = f"rdma.example-{address.device}"
    if "AIORDMA_LAB" in os.environ:
        with Path("/etc/hosts").open("a") as hosts:
            hosts.write(f"\n{address.host} {name}\n")
        yield name
        return
    answer = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address.host, 0))
    with mock.patch.object(socket, "getaddrinfo", return_value=[answer]):
        yield name


async def send_one_at_a_time(send: Callable[[bytes], Awaitable[None]], to: Connection) -> None:
    """Send messages for ever. Send the next one only after `to` has received the last."""
    for number in itertools.count(to.stats.messages_received + 1):
        await send(b"too fast")
        await loops.until(
            partial(_has_received_or_ended, to, number), f"message {number} to arrive"
        )


@contextlib.contextmanager
def kernel_parameter(name: str, value: str) -> Iterator[None]:
    """Set a parameter of the kernel in the block: a path below /proc/sys. See sysctl(8)."""
    path = Path("/proc/sys", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def has_received(connection: Connection, count: int) -> bool:
    """Return True if at least `count` messages have arrived at a connection so far."""
    return connection.stats.messages_received >= count


def _has_received_or_ended(connection: Connection, count: int) -> bool:
    return connection.closed or has_received(connection, count)
