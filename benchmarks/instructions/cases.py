"""What is counted: for each case, what is done before, and the operation itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiordma import Connection, ConnectionOptions, RemoteBuffer
from benchmarks.instructions.device import CountedDevice

SHORT = 64
LONG = 1 << 16
# Of what is short, so that what comes by chance, such as another thread that wakes, weighs little.
MANY = 2048


@dataclass(frozen=True)
class Setting:
    """A connection, and the device that it is on."""

    connection: Connection
    device: CountedDevice


Run = Callable[[int], Awaitable[None]]
"""Does so many operations."""


@dataclass(frozen=True)
class Case:
    """An operation that is counted."""

    title: str
    make: Callable[[Setting], Awaitable[Run]]
    """What is to be counted, with all that it needs."""
    prepare: Callable[[Setting, int], Awaitable[None]] | None = None
    """What comes before so many of them, and is not counted."""
    options: Callable[[int], ConnectionOptions] = lambda count: ConnectionOptions()
    """The connection's, for so many operations at once."""
    times: int = 256
    """So many are counted, against twice as many. A multiple of send_depth, so that each count has
    its whole share of what comes once a queue."""


# --- sending ---


async def _send(setting: Setting) -> Run:
    send, data = setting.connection.send, bytes(SHORT)

    async def run(count: int) -> None:
        for _ in range(count):
            await send(data)

    return run


async def _send_registered(setting: Setting) -> Run:
    send, region = setting.connection.send, await setting.connection.allocate(LONG)

    async def run(count: int) -> None:
        for _ in range(count):
            await send(region)

    return run


async def _write(setting: Setting) -> Run:
    write, region = setting.connection.write, await setting.connection.allocate(LONG)
    remote = RemoteBuffer(0x1000, 7, LONG)

    async def run(count: int) -> None:
        for _ in range(count):
            await write(region, remote)

    return run


async def _read(setting: Setting) -> Run:
    read, region = setting.connection.read, await setting.connection.allocate(LONG)
    remote = RemoteBuffer(0x1000, 7, LONG)

    async def run(count: int) -> None:
        for _ in range(count):
            await read(remote, region)

    return run


# --- receiving ---


async def _recv(setting: Setting) -> Run:
    recv = setting.connection.recv

    async def run(count: int) -> None:
        for _ in range(count):
            await recv()

    return run


async def _let_arrive(setting: Setting, count: int) -> None:
    for _ in range(count):
        setting.device.arrive(SHORT)
    while setting.connection.stats.messages_unread < count:
        await asyncio.sleep(0)


async def _owe(setting: Setting, count: int) -> None:
    setting.device.owe(count, SHORT)


def _deep(count: int) -> ConnectionOptions:
    """Room for so many messages that have come and are not taken."""
    return ConnectionOptions(recv_depth=count, max_message_size=SHORT)


def _wide(count: int) -> ConnectionOptions:
    return ConnectionOptions(max_message_size=LONG)


CASES = {
    "send": Case("send of 64 bytes", _send, times=MANY),
    "recv": Case("recv() of 64 bytes that are there", _recv, _let_arrive, _deep, MANY),
    "recv-wait": Case("recv() of 64 bytes that the loop waits for", _recv, _owe),
    "send-registered": Case("send of 64 KiB of registered memory", _send_registered, None, _wide),
    "write": Case("write of 64 KiB of registered memory", _write),
    "read": Case("read of 64 KiB into registered memory", _read),
}
"""By their names on the command line."""
