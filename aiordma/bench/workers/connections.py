"""Connections set up and torn down, so many at once."""

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


async def hold(connection: Connection) -> None:
    """Wait for the peer to end it."""
    async for _ in connection:
        pass


async def hold_while(listener: Listener, first: Callable[[Connection], Awaitable[None]]) -> None:
    """Accept one connection and run `first(connection)`; hold all others until that has returned.

    So nobody has to count them: one that ends while it is being accepted is never seen.
    """
    async with await listener.accept() as connection, task_group(running_loop()) as tasks:
        tasks.create_task(listener.serve(hold))
        await first(connection)
        listener.abort()


async def repeat(count: int, at_once: int, do: Callable[[], Awaitable[None]]) -> None:
    """Await `do()` so many times, in at most `at_once` tasks, each as soon as it can."""
    left = [None] * count

    async def work() -> None:
        while left:
            left.pop()
            await do()

    async with task_group(running_loop()) as tasks:
        for _ in range(min(at_once, count)):
            tasks.create_task(work())


OPTIONS = ConnectionOptions(send_depth=1, recv_depth=1, max_message_size=64)


async def serve_connections(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Accept all of them, and wait for each to end."""
    async with aiordma.listen(host, 0, options=OPTIONS) as listener:
        announce(listener.local_address[1])
        await hold_while(listener, hold)


async def drive_connections(host: str, port: int, work: Work) -> Sample:
    """Connect and close. One more connection keeps the server there."""

    async def connect() -> None:
        async with aiordma.connect(host, port, options=OPTIONS):
            pass

    async with aiordma.connect(host, port, options=OPTIONS):
        await repeat(work.warmup, work.concurrency, connect)
        return await time_all(lambda: repeat(work.count, work.concurrency, connect), work.count, 1)


ASK_MEMORY = b"memory"
NUMBER = struct.Struct("!Q")
SHARED = ConnectionOptions(send_depth=4, recv_depth=1, max_message_size=64, shared_recv_depth=256)
OWN = replace(SHARED, shared_recv_depth=0)


def memory() -> int:
    """The memory of this process in bytes: its own, and its share of what is shared (PSS)."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


async def serve_idle(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve the active connection, and hold the others until it ends."""
    async with aiordma.listen(host, 0, options=SHARED) as listener:
        announce(listener.local_address[1])
        await hold_while(listener, _answer)


async def _answer(active: Connection) -> None:
    async for message in active:
        await active.send(NUMBER.pack(memory()) if message == ASK_MEMORY else message)


async def drive_idle(host: str, port: int, work: Work) -> Sample:
    """Connect the active one, time it, connect the others, time it again."""
    async with aiordma.connect(host, port, options=OWN) as active:
        alone = await time_latency(active, work)
        before = await _memory_of(active)
        idle = await _connect_all(host, port, work)
        after = await _memory_of(active)
        among = await time_latency(active, work)
        await _end_all(idle)
    each = (after - before) / len(idle) / 1024
    ratio = among.value / alone.value
    latencies = {"latency_alone": alone.value, "latency_among": among.value, "latency_ratio": ratio}
    return Sample(each, details={**latencies, "connections": len(idle)})


async def _memory_of(active: Connection) -> int:
    await active.send(ASK_MEMORY)
    (found,) = NUMBER.unpack(await active.recv())
    return int(found)


async def _connect_all(host: str, port: int, work: Work) -> list[Connection]:
    made: list[Connection] = []

    async def connect() -> None:
        made.append(await aiordma.connect(host, port, options=OWN))

    await repeat(work.idle, work.concurrency, connect)
    return made


async def _end_all(connections: list[Connection]) -> None:
    for connection in connections:
        connection.abort()
    for connection in connections:
        await connection.aclose()
