"""Start C programs of rdma-core as peers."""

from __future__ import annotations

import asyncio

import aiordma
from aiordma import ConnectionOptions
from aiordma.rdmacm import DeviceAddress


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
    while True:
        try:
            return await aiordma.connect(host, port, options=options)
        except aiordma.Rejected:
            await asyncio.sleep(0.1)
