"""Connections: their calls of worker threads, and their registrations of memory, are few."""

from __future__ import annotations

from collections.abc import Callable

import loops
import pytest
from simulator import Simulation
from simulator.pairs import PORT
from simulator.verbs import Region

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.loop.workers import WorkerPool
from aiordma.memory.buffer_pool import LARGEST_KEPT_REGION

SMALL = ConnectionOptions(recv_depth=4, max_message_size=64)


async def keep_open(connection: Connection) -> None:
    async for _ in connection:
        pass


async def test_connecting_and_closing_takes_few_calls_of_worker_threads(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each side one to make the queue pair, one to disconnect, and one to destroy it.

    On iWARP, rdma_connect() blocks and is another one.
    """
    submit = WorkerPool.submit
    jobs = 0

    def count(pool: WorkerPool, job: Callable[[], None]) -> None:
        nonlocal jobs
        jobs += 1
        submit(pool, job)

    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        serving = loops.create_task(listener.serve(keep_open))
        async with aiordma.connect(host, PORT):
            await loops.sleep(1)
            monkeypatch.setattr(WorkerPool, "submit", count)
            async with aiordma.connect(host, PORT):
                await loops.sleep(1)
            await loops.sleep(1)
            assert jobs == 6 + simulation.near.is_iwarp
        await loops.cancel(serving)


async def greet(connection: Connection) -> None:
    await connection.send(b"first")
    await keep_open(connection)


@pytest.mark.parametrize("is_held", [False, True])
async def test_small_receive_buffers_are_used_again_if_nothing_refers_to_them(
    simulation: Simulation, is_held: bool
) -> None:
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        serving = loops.create_task(listener.serve(greet))
        async with aiordma.connect(host, PORT):
            async with aiordma.connect(host, PORT, options=SMALL) as first:
                memory = first._endpoint.data_path._ring._region
                message = await first.recv_message()
                if not is_held:
                    message.release()
            async with aiordma.connect(host, PORT, options=SMALL) as second:
                ring = second._endpoint.data_path._ring
                assert (ring._region is memory) != is_held
                assert await second.recv() == b"first"
            if is_held:
                assert bytes(message) == b"first"
                message.release()
        await loops.cancel(serving)


async def test_large_receive_buffers_are_freed(simulation: Simulation) -> None:
    large = ConnectionOptions(recv_depth=4, max_message_size=LARGEST_KEPT_REGION)
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        serving = loops.create_task(listener.serve(keep_open))
        async with aiordma.connect(host, PORT):
            regions = simulation.world.all(Region)
            async with aiordma.connect(host, PORT, options=large):
                assert len(simulation.world.all(Region)) > len(regions)
            await loops.sleep(1)
            assert simulation.world.all(Region) == regions
        await loops.cancel(serving)
