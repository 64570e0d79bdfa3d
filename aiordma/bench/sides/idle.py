"""Connections that do nothing, to one server on one loop: what they cost, and what they slow down.

The first connection is the active one. It is timed alone and then among the idle ones, and by it
the client asks the server how much memory its process has.
"""

from __future__ import annotations

import gc
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.bench.sample import Sample
from aiordma.bench.sides.crowd import repeat
from aiordma.bench.sides.holding import hold_while
from aiordma.bench.sides.messages import time_latency
from aiordma.bench.work import Work

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


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve the active connection, and hold the others until it ends."""
    async with aiordma.listen(host, 0, options=SHARED) as listener:
        announce(listener.local_address[1])
        await hold_while(listener, _answer)


async def _answer(active: Connection) -> None:
    async for message in active:
        await active.send(NUMBER.pack(memory()) if message == ASK_MEMORY else message)


async def drive(host: str, port: int, work: Work) -> Sample:
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
