"""Connection: round trips, messages in one direction, and operations of many tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import aiordma
from aiordma import AccessFlags, Connection, ConnectionOptions, PeerClosed, RemoteBuffer
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all, time_round_trips
from aiordma.loop import running_loop, task_group

DONE = b"done"
SEND_DEPTH, RECV_DEPTH = 128, 512
"""The depths of the send queue and of the receive ring, the same as perftest's."""
MAX_RING_BYTES = 8 << 20
"""The size of the receive buffers for large messages. But there are at least twice `Work.depth`.
perftest receives all messages in the same memory, which stays in the processor's caches."""
MAX_READS = 255
"""The maximum number of reads in flight on a connection. Most devices allow fewer."""
ACCESS = {
    "write": AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE,
    "read": AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ,
}


def options(work: Work) -> ConnectionOptions:
    """Return the options of both connections.

    Queues and buffers are deep enough that neither peer waits for the other, as with perftest.
    """
    if work.operation != "send":
        reads = min(work.depth, MAX_READS)
        return ConnectionOptions(
            send_depth=SEND_DEPTH,
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
        send_depth=SEND_DEPTH,
        recv_depth=max(2 * work.depth, min(RECV_DEPTH, MAX_RING_BYTES // work.size)),
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
        receive = _receive if work.test == "rate" else _receive_without_copy
        for count in (work.warmup, work.count):
            await receive(connection, count)
            await connection.send(DONE)
        await _wait_for_end(connection)
    else:
        async with await connection.allocate(work.size, ACCESS[work.operation]) as region:
            await connection.send(region.remote.pack())
            await _wait_for_end(connection)


async def _receive(connection: Connection, count: int) -> None:
    for _ in range(count):
        await connection.recv()


async def _receive_without_copy(connection: Connection, count: int) -> None:
    """Receive messages in their receive buffers, and release each buffer at once."""
    for _ in range(count):
        (await connection.recv_message()).release()


async def _wait_for_end(connection: Connection) -> None:
    try:
        await connection.recv()
    except PeerClosed:
        return


async def measure(host: str, port: int, work: Work) -> Sample:
    """Connect and do the work.

    In `bandwidth` only the server polls busily. Of the client's many tasks, some can always go on.
    """
    if work.test == "bandwidth":
        work = replace(work, busy_poll=0.0)
    tests = {"latency": time_latency, "rate": _rate, "bandwidth": _bandwidth}
    async with aiordma.connect(host, port, options=options(work)) as connection:
        return await tests[work.test](connection, work)


async def time_latency(connection: Connection, work: Work) -> Sample:
    """Time round trips, one after another, with a peer that echoes messages."""
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
    """Time operations of `work.depth` tasks, all on the same memory, as perftest's are."""
    remote = RemoteBuffer(0, 0, 0)
    if work.operation != "send":
        remote = RemoteBuffer.unpack(await connection.recv())
    reads = work.operation == "read"
    access = connection.read_access if reads else AccessFlags.LOCAL_WRITE
    async with await connection.allocate(work.size, access) as region:

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
    """Return the number of operations of task `number`, of `depth` tasks with `count` together."""
    return count // depth + (number < count % depth)
