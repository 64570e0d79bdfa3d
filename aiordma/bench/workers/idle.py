"""Idle connections and byte streams: their memory, and what they cost an active one.

All of them are to one server on one event loop. The first one is the active one: the client times
its round trips, alone and then with the others. By it the client also asks the server for the
memory of its process.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import struct
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import aiordma
from aiordma import ByteStream, Connection, ConnectionOptions, StreamOptions
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.connections import AnyListener, repeat, serve_while
from aiordma.bench.workers.timing import time_round_trips_for

Peer = Connection | ByteStream

MESSAGE_SIZE = 64
MEMORY_REQUEST = b"memory".ljust(MESSAGE_SIZE)
NUMBER = struct.Struct("!Q")
SERVER = ConnectionOptions(send_depth=4, recv_depth=1, max_message_size=64, shared_recv_depth=256)
CLIENT = replace(SERVER, shared_recv_depth=0)
SMALL_STREAM = StreamOptions(
    send_buffer=8192, recv_buffer=8192, send_depth=16, recv_depth=16, max_inline=32
)


def memory() -> int:
    """Return the memory of this process in bytes.

    It is the proportional set size (PSS): private memory, and a share of the shared memory.
    """
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


async def receive(peer: Peer) -> bytes:
    """Return the next message, of MESSAGE_SIZE bytes; b"" if the peer has closed."""
    if isinstance(peer, Connection):
        return await anext(peer, b"")
    message = data = await peer.receive(MESSAGE_SIZE)
    while data and len(message) < MESSAGE_SIZE:
        data = await peer.receive(MESSAGE_SIZE - len(message))
        message += data
    return message


async def exchange(peer: Peer, message: bytes) -> bytes:
    """Send a message, and return the answer.

    Raises:
        EOFError: the peer closed before.
    """
    await peer.send(message)
    answer = await receive(peer)
    if not answer:
        raise EOFError("the server has closed before it has answered")
    return answer


async def answer(peer: Peer) -> None:
    """Answer each message with the same message, or with the memory of this process."""
    while message := await receive(peer):
        if message == MEMORY_REQUEST:
            message = NUMBER.pack(memory()).ljust(MESSAGE_SIZE)
        await peer.send(message)


async def server_memory(active: Peer) -> int:
    """Return the memory of the server's process in bytes."""
    (found,) = NUMBER.unpack_from(await exchange(active, MEMORY_REQUEST))
    return int(found)


async def time_active(active: Peer, seconds: float, work: Work) -> Sample:
    """Time the round trips of the active peer for `seconds`."""
    message = bytes(MESSAGE_SIZE)
    return await time_round_trips_for(lambda: exchange(active, message), seconds, work.warmup)


@dataclass(frozen=True)
class Transport:
    """The functions that listen and connect."""

    listen: Callable[[str], AbstractAsyncContextManager[AnyListener[Peer]]]
    connect: Callable[[str, int], Awaitable[Peer]]

    async def serve(self, host: str, announce: Callable[[int], None], work: Work) -> None:
        """Answer all peers until the active one, which is the first, closes."""
        async with self.listen(host) as listener:
            announce(listener.local_address[1])
            await serve_while(listener, answer, answer)

    async def measure_memory(self, host: str, port: int, work: Work) -> Sample:
        """Return the server's memory for each connection, and the round trips among them."""
        async with await self.connect(host, port) as active:
            alone = await time_active(active, work.interval / 3, work)
            before = await server_memory(active)
            idle = await self.connect_all(host, port, work)
            after = await server_memory(active)
            among = await time_active(active, work.interval / 3, work)
            await close_all(idle)
        each = (after - before) / len(idle) / 1024
        return Sample(each, details=_latencies(alone, among, len(idle)))

    async def measure_answering(self, host: str, port: int, work: Work) -> Sample:
        """Return the round trips among connections that each have one in each interval.

        The rounds of the others are spread over the interval. So the time among them is one
        interval.
        """
        async with await self.connect(host, port) as active:
            alone = await time_active(active, work.interval, work)
            others = await self.connect_all(host, port, work)
            asking = [Asking(peer, work.interval) for peer in others]
            tasks = [asyncio.create_task(one.run()) for one in asking]
            among = await time_active(active, work.interval, work)
            answers = sum(one.answers for one in asking)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close_all(others)
        details = {**_latencies(alone, among, len(others)), "answers": answers}
        return replace(among, details=details)

    async def connect_all(self, host: str, port: int, work: Work) -> list[Peer]:
        """Connect the idle connections."""
        connected: list[Peer] = []

        async def connect() -> None:
            connected.append(await self.connect(host, port))

        await repeat(work.idle, work.concurrency, connect)
        return connected


@dataclass
class Asking:
    """A peer that has a round trip in each interval."""

    peer: Peer
    interval: float
    answers: int = 0

    async def run(self) -> None:
        """Have one round trip after another, the first at a random time of the interval."""
        await asyncio.sleep(random.uniform(0, self.interval))
        while True:
            await exchange(self.peer, bytes(MESSAGE_SIZE))
            self.answers += 1
            await asyncio.sleep(self.interval)


def _latencies(alone: Sample, among: Sample, connections: int) -> dict[str, float]:
    fast_alone, fast_among = alone.details["fastest"], among.details["fastest"]
    return {
        "latency_alone": fast_alone,
        "latency_among": fast_among,
        "latency_ratio": fast_among / fast_alone,
        "connections": connections,
    }


async def close_all(peers: list[Peer]) -> None:
    """Abort all, then wait until all are destroyed."""
    for peer in peers:
        peer.abort()
    for peer in peers:
        await peer.aclose()


CONNECTIONS = Transport(
    lambda host: aiordma.listen(host, 0, options=SERVER),
    lambda host, port: aiordma.connect(host, port, options=CLIENT),
)
STREAMS = Transport(
    lambda host: aiordma.listen_stream(host, 0, options=SMALL_STREAM),
    lambda host, port: aiordma.connect_stream(host, port, options=SMALL_STREAM),
)
