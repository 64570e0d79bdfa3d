"""Start C programs of rdma-core as peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import loops
import pytest

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress

T = TypeVar("T")
PRELOAD = {"LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"}
"""The environment in which a TCP program uses rsocket instead."""


@contextlib.asynccontextmanager
async def running_peer(
    *command: object, prints: str = "", environment: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program. After the block it ends: its exit code is 0, and its output has `prints`.

    A failure of the block kills it. The block can kill it, too.
    """
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield process
        output, errors = (text.decode() for text in await process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != -signal.SIGKILL:
        assert process.returncode == 0, output + errors
        assert prints in output or prints in errors


async def unless_ended(process: asyncio.subprocess.Process, awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`. If the program ends before, fail with its output."""
    waiting, ended = asyncio.ensure_future(awaitable), asyncio.create_task(process.wait())
    try:
        await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            output, errors = (text.decode() for text in await process.communicate())
            pytest.fail(f"the program ended with exit code {process.returncode}: {output}{errors}")
        return await waiting
    finally:
        waiting.cancel()
        ended.cancel()


async def free_port(address: DeviceAddress) -> int:
    """Return a port that is free at the address."""
    async with aiordma.listen(address.host, 0) as listener:
        return listener.local_address[1]


async def connect_when_it_listens(
    host: str, port: int, options: ConnectionOptions
) -> aiordma.Connection:
    """Connect to a program that might still be starting: repeat until it listens."""
    return await until_accepted(lambda: aiordma.connect(host, port, options=options), port)


async def until_accepted(connect: Callable[[], Awaitable[T]], port: int) -> T:
    """Repeat `connect()` until a program listens on `port` and does not reject it."""

    results: list[T] = []

    async def try_to_connect() -> bool:
        with contextlib.suppress(aiordma.Rejected):
            results.append(await connect())
        return bool(results)

    await loops.until(try_to_connect, f"a program to listen on port {port}")
    return results[0]
