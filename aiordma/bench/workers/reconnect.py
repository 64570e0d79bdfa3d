"""Reconnecting: a server is killed and started again, and all clients connect again at once."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable

import aiordma
from aiordma import Connection
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.connections import repeat
from aiordma.bench.workers.idle import close_all
from aiordma.bench.workers.options import CLIENT, MESSAGE_SIZE
from aiordma.bench.workers.reconnect_server import DIE, STOP

SERVER_COMMAND = (sys.executable, "-m", "aiordma.bench.workers.reconnect_server")
FIRST_BACKOFF, LARGEST_BACKOFF = 0.1, 5.0
"""Seconds. A client waits a random part of the back-off, which doubles with each failure."""


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Run the server in a child process, and start it again at the same port if it is killed."""
    port = 0
    while True:
        server = await asyncio.create_subprocess_exec(*SERVER_COMMAND, host, str(port), stdout=PIPE)
        assert server.stdout is not None
        line = await server.stdout.readline()
        if line and not port:
            port = json.loads(line)["port"]
            announce(port)
        code = await server.wait()
        if code == 0:
            return
        if code != -signal.SIGKILL:
            raise RuntimeError(f"the server ended with exit code {code}")


async def measure(host: str, port: int, work: Work) -> Sample:
    """Connect all clients, kill the server, and time until each client is served again."""
    clients = [_Client(host, port) for _ in range(work.idle)]
    waiting = iter(clients)
    await repeat(work.idle, work.concurrency, lambda: next(waiting).connect())
    killing = clients[0]
    cpu, begin = time.process_time(), time.perf_counter()
    tasks = [asyncio.create_task(client.reconnect()) for client in clients]
    await killing.connection.send(DIE)
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin
    each = (time.process_time() - cpu) / work.idle * 1e6
    served = sorted(client.served - begin for client in clients)
    details = {
        "seconds": seconds,
        "first": served[0],
        "median": served[len(served) // 2],
        "failures": float(sum(client.failures for client in clients)),
        "connections": work.idle,
    }
    await killing.connection.send(STOP)
    await close_all([client.connection for client in clients])
    return Sample(work.idle / seconds, client_cpu=each, details=details)


class _Client:
    """A client that connects again if the connection has ended."""

    def __init__(self, host: str, port: int) -> None:
        self._connect = functools.partial(aiordma.connect, host, port, options=CLIENT)
        self.connection: Connection
        self.served = 0.0
        """The time at which it was served last."""
        self.failures = 0
        """The number of attempts to connect that failed."""

    async def connect(self) -> None:
        """Connect, and have one round trip."""
        self.connection = await self._connect()
        await self.connection.send(bytes(MESSAGE_SIZE))
        await self.connection.recv()
        self.served = time.perf_counter()

    async def reconnect(self) -> None:
        """Wait for the end of the connection, and connect again until the server answers."""
        async for _ in self.connection:
            pass
        backoff = FIRST_BACKOFF
        while True:
            await self.connection.aclose()
            try:
                await self.connect()
            except aiordma.RdmaError:
                self.failures += 1
                await asyncio.sleep(random.uniform(0, backoff))
                backoff = min(2 * backoff, LARGEST_BACKOFF)
            else:
                return
