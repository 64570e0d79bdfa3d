"""Connections: the time to set them up and tear them down, and the memory of idle ones."""

from __future__ import annotations

import gc
import re
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiordma
from aiordma import Connection, ConnectionOptions, Listener
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.messages import time_latency
from aiordma.bench.workers.timing import time_all
from aiordma.loop import running_loop, task_group


async def keep_open(connection: Connection) -> None:
    """Keep a connection open until the peer closes it."""
    async for _ in connection:
        pass


async def serve_while(listener: Listener, first: Callable[[Connection], Awaitable[None]]) -> None:
    """Accept a connection and run `first(connection)`; keep all others open until it returns.

    The server stops when the first connection ends, not after a number of connections. Their number
    is unknown: a connection that the client closes while it is being accepted is never accepted.
    """
    async with await listener.accept() as connection, task_group(running_loop()) as tasks:
        tasks.create_task(listener.serve(keep_open))
        await first(connection)
        listener.abort()


async def repeat(count: int, concurrency: int, function: Callable[[], Awaitable[None]]) -> None:
    """Await `function()` `count` times, in at most `concurrency` tasks."""
    remaining = [None] * count

    async def work() -> None:
        while remaining:
            remaining.pop()
            await function()

    async with task_group(running_loop()) as tasks:
        for _ in range(min(concurrency, count)):
            tasks.create_task(work())


# --- set up and torn down ---

SMALL = ConnectionOptions(send_depth=1, recv_depth=1, max_message_size=64)


async def serve_connections(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Accept connections, and keep each open until the client closes it."""
    async with aiordma.listen(host, 0, options=SMALL) as listener:
        announce(listener.local_address[1])
        await serve_while(listener, keep_open)


async def measure_connections(host: str, port: int, work: Work) -> Sample:
    """Connect and close, again and again. One more connection keeps the server running."""

    async def connect() -> None:
        async with aiordma.connect(host, port, options=SMALL):
            pass

    async with aiordma.connect(host, port, options=SMALL):
        await repeat(work.warmup, work.concurrency, connect)
        return await time_all(lambda: repeat(work.count, work.concurrency, connect), work.count, 1)


# --- idle ---
#
# All connections are to one server on one event loop. The first one is the active connection: the
# client times its round trips, alone and then with the idle connections. By it the client also
# asks the server for the memory of its process.

MEMORY_REQUEST = b"memory"
NUMBER = struct.Struct("!Q")
SERVER = ConnectionOptions(send_depth=4, recv_depth=1, max_message_size=64, shared_recv_depth=256)
CLIENT = replace(SERVER, shared_recv_depth=0)


def memory() -> int:
    """Return the memory of this process in bytes.

    It is the proportional set size (PSS): private memory, and a share of the shared memory.
    """
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


async def serve_idle(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve the active connection, and keep the others open until it is closed."""
    async with aiordma.listen(host, 0, options=SERVER) as listener:
        announce(listener.local_address[1])
        await serve_while(listener, _serve_active)


async def _serve_active(active: Connection) -> None:
    async for message in active:
        await active.send(NUMBER.pack(memory()) if message == MEMORY_REQUEST else message)


async def measure_idle(host: str, port: int, work: Work) -> Sample:
    """Connect and time the active connection, connect the idle ones, time the active one again."""
    async with aiordma.connect(host, port, options=CLIENT) as active:
        alone = await time_latency(active, work)
        before = await _server_memory(active)
        idle = await _connect_all(host, port, work)
        after = await _server_memory(active)
        among = await time_latency(active, work)
        await _close_all(idle)
    each = (after - before) / len(idle) / 1024
    ratio = among.value / alone.value
    latencies = {"latency_alone": alone.value, "latency_among": among.value, "latency_ratio": ratio}
    return Sample(each, details={**latencies, "connections": len(idle)})


async def _server_memory(active: Connection) -> int:
    await active.send(MEMORY_REQUEST)
    (found,) = NUMBER.unpack(await active.recv())
    return int(found)


async def _connect_all(host: str, port: int, work: Work) -> list[Connection]:
    connected: list[Connection] = []

    async def connect() -> None:
        connected.append(await aiordma.connect(host, port, options=CLIENT))

    await repeat(work.idle, work.concurrency, connect)
    return connected


async def _close_all(connections: list[Connection]) -> None:
    for connection in connections:
        connection.abort()
    for connection in connections:
        await connection.aclose()
