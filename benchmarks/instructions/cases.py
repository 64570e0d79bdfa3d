"""The cases that are counted: for each one the operation, and the preparation before it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

import aiordma.asyncio
from aiordma import Connection, ConnectionOptions, RemoteBuffer
from aiordma.streams.wire import TARGETS, ConnectionData, Op, Segment, pack_message
from benchmarks.instructions.device import CountedDevice

SMALL = 64
LARGE = 1 << 16
# Cheap operations are counted that often, so that random events, such as a thread that wakes,
# change the count of one operation little.
MANY = 2048
TASKS = 32


@dataclass
class Setup:
    """A connection, and its device."""

    connection: Connection
    device: CountedDevice
    peer: tuple[str, int]
    """The address that the connection is connected to."""
    event: int
    """An eventfd."""
    far_socket: socket.socket | None = None
    """The other end of the socket of a case that has one."""


Run = Callable[[int], Coroutine[object, None, None]]
"""Does the given number of operations."""


@dataclass(frozen=True)
class Case:
    """An operation that is counted."""

    title: str
    make_run: Callable[[Setup], Awaitable[Run]]
    """Returns the function that is counted. What it needs is made before, and is not counted."""
    prepare: Callable[[Setup, int], Awaitable[None]] | None = None
    """Called before a run of the given number of operations. It is not counted."""
    options: Callable[[int], ConnectionOptions] = lambda count: ConnectionOptions()
    """Returns the options of a connection for runs of at most that many operations."""
    count: int = 256
    """The number of operations in the shorter of the two runs that are compared.

    It is a multiple of send_depth, so that both runs have their whole share of the work that is
    done once for each full send queue.
    """


# --- sending ---


async def _send(setup: Setup) -> Run:
    send, data = setup.connection.send, bytes(SMALL)

    async def run(count: int) -> None:
        for _ in range(count):
            await send(data)

    return run


async def _send_registered(setup: Setup) -> Run:
    send, region = setup.connection.send, await setup.connection.allocate(LARGE)

    async def run(count: int) -> None:
        for _ in range(count):
            await send(region)

    return run


async def _write(setup: Setup) -> Run:
    write, region = setup.connection.write, await setup.connection.allocate(LARGE)
    remote = RemoteBuffer(0x1000, 7, LARGE)

    async def run(count: int) -> None:
        for _ in range(count):
            await write(region, remote)

    return run


async def _read(setup: Setup) -> Run:
    read, region = setup.connection.read, await setup.connection.allocate(LARGE)
    remote = RemoteBuffer(0x1000, 7, LARGE)

    async def run(count: int) -> None:
        for _ in range(count):
            await read(remote, region)

    return run


async def _write_concurrently(setup: Setup) -> Run:
    write = await _write(setup)

    async def run(count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TASKS):
                tasks.create_task(write(count // TASKS))

    return run


# --- receiving ---


async def _recv(setup: Setup) -> Run:
    recv = setup.connection.recv

    async def run(count: int) -> None:
        for _ in range(count):
            await recv()

    return run


async def _arrive_now(setup: Setup, count: int) -> None:
    for _ in range(count):
        setup.device.arrive(SMALL)
    while setup.connection.stats.messages_unread < count:
        await asyncio.sleep(0)


async def _arrive_on_wait(setup: Setup, count: int) -> None:
    setup.device.arrive_on_wait(count, SMALL)


# --- connecting ---


async def _connect(setup: Setup) -> Run:
    options = ConnectionOptions(send_depth=1, recv_depth=1, max_message_size=SMALL)

    async def run(count: int) -> None:
        for _ in range(count):
            async with aiordma.connect(*setup.peer, options=options):
                pass

    return run


# --- a protocol of asyncio on a transport ---


class _Waits(asyncio.Protocol):
    """Ends a wait when it was called with data as often as the run has operations."""

    def __init__(self) -> None:
        self._left = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._left -= 1
        if not self._left:
            self._done.set_result(None)

    async def run(self, count: int) -> None:
        self._left, self._done = count, asyncio.get_running_loop().create_future()
        await self._done


async def _receive_by_protocol(setup: Setup) -> Run:
    memory = Segment(0x1000, 7, LARGE)
    data = ConnectionData(MANY, memory._replace(length=TARGETS), memory, sys.byteorder)
    setup.device.accept_with(data.pack())
    _, protocol = await aiordma.asyncio.create_connection(_Waits, *setup.peer)
    return protocol.run


async def _write_on_wait(setup: Setup, count: int) -> None:
    setup.device.write_on_wait(count, SMALL, pack_message(Op.DATA, SMALL))


async def _receive_from_socket(setup: Setup) -> Run:
    near, setup.far_socket = socket.socketpair()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    _, protocol = await loop.connect_accepted_socket(_Waits, near)
    return protocol.run


async def _send_on_wait(setup: Setup, count: int) -> None:
    assert setup.far_socket is not None
    setup.device.signal_on_wait(count, setup.far_socket.fileno())


# --- the controls: a coroutine, and a wait, with nothing of aiordma ---


class _Returner:
    """An object whose method does what recv() of a message that has arrived must do at least."""

    def __init__(self) -> None:
        self._take = bytes

    async def recv(self) -> bytes:
        take = self._take
        return take()


async def _await_coroutine(setup: Setup) -> Run:
    recv = _Returner().recv

    async def run(count: int) -> None:
        for _ in range(count):
            await recv()

    return run


async def _wait_for_eventfd(setup: Setup) -> Run:
    loop, event = asyncio.get_running_loop(), setup.event
    waiters: list[asyncio.Future[None]] = []

    def on_readable() -> None:
        os.eventfd_read(event)
        waiters.pop().set_result(None)

    loop.add_reader(event, on_readable)

    async def run(count: int) -> None:
        for _ in range(count):
            waiter = loop.create_future()
            waiters.append(waiter)
            await waiter

    return run


async def _signal_on_wait(setup: Setup, count: int) -> None:
    setup.device.signal_on_wait(count, setup.event)


def _deep(count: int) -> ConnectionOptions:
    """Return options with receive buffers for `count` messages that have arrived."""
    return ConnectionOptions(recv_depth=count, max_message_size=SMALL)


def _large_messages(count: int) -> ConnectionOptions:
    return ConnectionOptions(max_message_size=LARGE)


CASES = {
    "send": Case("send of 64 bytes", _send, count=MANY),
    "recv": Case("recv() of 64 bytes that have arrived", _recv, _arrive_now, _deep, MANY),
    "recv-wait": Case("recv() of 64 bytes that the loop waits for", _recv, _arrive_on_wait),
    "coroutine": Case(
        "await of a coroutine that returns at once, without aiordma", _await_coroutine, count=MANY
    ),
    "control": Case(
        "eventfd, add_reader, future and task, without aiordma", _wait_for_eventfd, _signal_on_wait
    ),
    "send-registered": Case(
        "send of 64 KiB of registered memory", _send_registered, None, _large_messages
    ),
    "write": Case("write of 64 KiB of registered memory", _write),
    "write-tasks": Case(
        f"write of 64 KiB of registered memory, by {TASKS} tasks", _write_concurrently, count=MANY
    ),
    "read": Case("read of 64 KiB into registered memory", _read),
    "connect": Case("a connection made and closed, on the client's side", _connect),
    "protocol": Case(
        "data_received() of 64 bytes that the loop waits for", _receive_by_protocol, _write_on_wait
    ),
    "protocol-socket": Case(
        "the same of a socket, without aiordma", _receive_from_socket, _send_on_wait
    ),
}
"""The cases by their names on the command line."""
