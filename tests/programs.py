"""Start C programs of rdma-core as peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import loops

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress

T = TypeVar("T")


async def start(*command: str) -> asyncio.subprocess.Process:
    """Start a process whose standard output and standard error are one pipe."""
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill the process if it still runs, and wait until it has ended."""
    if process.returncode is None:
        process.kill()
        await process.wait()


async def free_port(address: DeviceAddress) -> str:
    """Return a port that is free at the address."""
    async with aiordma.listen(address.host, 0) as listener:
        return str(listener.local_address[1])


async def connect_when_it_listens(
    host: str, port: int, options: ConnectionOptions
) -> aiordma.Connection:
    """Connect to a program that might still be starting: repeat until it listens."""
    return await until_accepted(lambda: aiordma.connect(host, port, options=options), port)


async def until_accepted(connect: Callable[[], Awaitable[T]], port: int | str) -> T:
    """Repeat `connect()` until a program listens on `port` and does not reject it."""

    results: list[T] = []

    async def try_to_connect() -> bool:
        with contextlib.suppress(aiordma.Rejected):
            results.append(await connect())
        return bool(results)

    await loops.until(try_to_connect, f"a program to listen on port {port}")
    return results[0]
