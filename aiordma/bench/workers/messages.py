"""Connection, on every loop: round trips, messages one way, and operations side by side."""

from __future__ import annotations

from collections.abc import Callable

import aiordma
from aiordma import AccessFlags, Connection, ConnectionOptions, PeerClosed, RemoteBuffer
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all, time_round_trips
from aiordma.loop import running_loop, task_group

DONE = b"done"
SENDS, RING = 128, 512
"""Places in the send queue and receive buffers, as many as perftest has."""
RING_BYTES = 64 << 20
"""The most that they may take: large messages get fewer."""
MOST_READS = 255
"""The most that a connection can have under way; most devices have fewer."""
ACCESS = {
    "write": AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE,
    "read": AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ,
}


def options(work: Work) -> ConnectionOptions:
    """What both sides set: as with perftest, enough of all not to hold each other back."""
    if work.operation != "send":
        reads = min(work.depth, MOST_READS)
        return ConnectionOptions(
            send_depth=SENDS,
            responder_resources=reads,
            initiator_depth=reads,
            max_message_size=64,
            busy_poll=work.busy_poll,
        )
    if work.test == "latency":
        return ConnectionOptions(
            max_message_size=max(work.size, 64),
            busy_poll=work.busy_poll,
            adaptive_poll=work.adaptive_poll,
        )
    return ConnectionOptions(
        send_depth=SENDS,
        recv_depth=max(2 * work.depth, min(RING, RING_BYTES // work.size)),
        max_message_size=max(work.size, 64),
        busy_poll=work.busy_poll,
    )


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client."""
    async with aiordma.listen(host, 0, options=options(work)) as listener:
        announce(listener.local_address[1])
        async with await listener.accept() as connection:
            await _serve(connection, work)


async def _serve(connection: Connection, work: Work) -> None:
    if work.test == "latency":
        async for message in connection:
            await connection.send(message)
    elif work.operation == "send":
        for count in (work.warmup, work.count):
            await (_take if work.test == "rate" else _look_at)(connection, count)
            await connection.send(DONE)
        await _ended(connection)
    else:
        async with await connection.allocate(work.size, ACCESS[work.operation]) as region:
            await connection.send(region.remote.pack())
            await _ended(connection)


async def _take(connection: Connection, count: int) -> None:
    for _ in range(count):
        await connection.recv()


async def _look_at(connection: Connection, count: int) -> None:
    """Receive without a copy, and give the buffer back at once."""
    for _ in range(count):
        (await connection.recv_message()).release()


async def _ended(connection: Connection) -> None:
    try:
        await connection.recv()
    except PeerClosed:
        return


async def drive(host: str, port: int, work: Work) -> Sample:
    """Be the client."""
    tests = {"latency": time_latency, "rate": _rate, "bandwidth": _bandwidth}
    async with aiordma.connect(host, port, options=options(work)) as connection:
        return await tests[work.test](connection, work)


async def time_latency(connection: Connection, work: Work) -> Sample:
    """Time round trips, one after another, with a peer that sends back what comes."""
    data = bytes(work.size)

    async def exchange() -> None:
        await connection.send(data)
        await connection.recv()

    return await time_round_trips(exchange, work.count, work.warmup)


async def _rate(connection: Connection, work: Work) -> Sample:
    data = bytes(work.size)

    async def send(count: int) -> None:
        for _ in range(count):
            await connection.send(data)
        await connection.recv()

    await send(work.warmup)
    return await time_all(lambda: send(work.count), work.count, 1)


async def _bandwidth(connection: Connection, work: Work) -> Sample:
    """All operations are on the same memory, as perftest's are."""
    remote = RemoteBuffer(0, 0, 0)
    if work.operation != "send":
        remote = RemoteBuffer.unpack(await connection.recv())
    async with await connection.allocate(work.size) as region:

        async def operate(count: int) -> None:
            for _ in range(count):
                if work.operation == "send":
                    await connection.send(region)
                elif work.operation == "write":
                    await connection.write(region, remote)
                else:
                    await connection.read(remote, region)

        async def all_of(count: int) -> None:
            async with task_group(running_loop()) as tasks:
                for number in range(work.depth):
                    tasks.create_task(operate(_share(count, work.depth, number)))
            if work.operation == "send":
                await connection.recv()

        await all_of(work.warmup)
        return await time_all(lambda: all_of(work.count), work.count, work.size / 1e6)


def _share(count: int, depth: int, number: int) -> int:
    """How many of `count` operations fall to one of `depth` tasks."""
    return count // depth + (number < count % depth)
