"""Idle connections and byte streams: their memory, and what they cost an active one.

All of them are to one server on one event loop. The first one is the active one: the client times
its round trips. By it the client also asks the server for the memory of its process. The same
server and client without the others run at the same time. Both clients take turns.
"""

from __future__ import annotations

import asyncio
import gc
import re
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import aiordma
from aiordma import ByteStream, Connection, StreamOptions
from aiordma.bench.plan import TURN, Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.connections import AnyListener, repeat, serve_while
from aiordma.bench.workers.options import CLIENT, MESSAGE_SIZE, SERVER
from aiordma.bench.workers.timing import time_round_trips_for
from aiordma.bench.workers.turns import take_turns

Peer = Connection | ByteStream

MESSAGE = bytes(MESSAGE_SIZE)
MEMORY_REQUEST = b"memory".ljust(MESSAGE_SIZE)
NUMBER = struct.Struct("!Q")
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
    return await receive_answer(peer)


async def receive_answer(peer: Peer) -> bytes:
    """Return the answer to a message that was sent.

    Raises:
        EOFError: the peer closed before.
    """
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


async def warm_up(active: Peer, work: Work) -> None:
    """Have some round trips that are not timed."""
    for _ in range(work.warmup):
        await exchange(active, MESSAGE)


async def server_memory(active: Peer) -> int:
    """Return the memory of the server's process in bytes."""
    (found,) = NUMBER.unpack_from(await exchange(active, MEMORY_REQUEST))
    return int(found)


async def time_turn(active: Peer) -> Sequence[int]:
    """Return the times of the active peer's round trips in a turn, in nanoseconds."""
    return await time_round_trips_for(lambda: exchange(active, MESSAGE), TURN)


async def ask_all(peers: Sequence[Peer]) -> None:
    """Have one round trip with each of these peers, at even distances in a turn.

    When the loop runs late, the peers that are due are asked together: a late answer delays no
    other. One task asks all: a task for each would slow down the loop that is measured.
    """
    begin = time.monotonic()
    asked = 0
    while asked < len(peers):
        await asyncio.sleep(begin + TURN * asked / len(peers) - time.monotonic())
        passed = (time.monotonic() - begin) / TURN
        due = peers[asked : max(asked, int(passed * len(peers))) + 1]
        for peer in due:
            await peer.send(MESSAGE)
        for peer in due:
            await receive_answer(peer)
        asked += len(due)


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
        """Return the server's memory for each idle connection; time an active one in turns."""
        async with await self.connect(host, port) as active:
            await warm_up(active, work)
            before = await server_memory(active)
            idle = await self.connect_all(host, port, work)
            after = await server_memory(active)
            await take_turns(lambda: time_turn(active))
            await close_all(idle)
        each = (after - before) / max(1, len(idle)) / 1024
        return Sample(each, details={"connections": len(idle)})

    async def measure_answering(self, host: str, port: int, work: Work) -> Sample:
        """Time an active connection in turns. Each of the others has one round trip in all turns.

        They are spread over the turns. Return the round trips of the active connection.
        """
        async with await self.connect(host, port) as active:
            await warm_up(active, work)
            others = await self.connect_all(host, port, work)
            parts = iter([others[number :: work.turns] for number in range(work.turns)])

            async def turn() -> Sequence[int]:
                times, _ = await asyncio.gather(time_turn(active), ask_all(next(parts)))
                return times

            sample = await take_turns(turn)
            await close_all(others)
        return replace(sample, details={"connections": len(others)})

    async def connect_all(self, host: str, port: int, work: Work) -> list[Peer]:
        """Connect the idle connections."""
        connected: list[Peer] = []

        async def connect() -> None:
            connected.append(await self.connect(host, port))

        await repeat(work.idle, work.concurrency, connect)
        return connected


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
