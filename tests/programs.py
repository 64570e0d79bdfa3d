"""C programs of rdma-core, started as peers."""

from __future__ import annotations

import asyncio

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress


async def start(*command: str) -> asyncio.subprocess.Process:
    """A process whose output and errors are one pipe."""
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it if it still runs, and wait for it."""
    if process.returncode is None:
        process.kill()
        await process.wait()


async def free_port(address: DeviceAddress) -> str:
    """A port that nobody listens on there."""
    async with aiordma.listen(address.host, 0) as listener:
        return str(listener.local_address[1])


async def connect_when_it_listens(
    host: str, port: int, options: ConnectionOptions
) -> aiordma.Connection:
    """Connect to a program that is still starting."""
    while True:
        try:
            return await aiordma.connect(host, port, options=options)
        except aiordma.Rejected:
            await asyncio.sleep(0.1)
