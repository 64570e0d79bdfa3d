"""Connections: their calls of worker threads, and their registrations of memory, are few."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import loops
import pytest
from simulator import Simulation
from simulator.pairs import PORT
from simulator.verbs import Region

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.dispatch import LoopDevice
from aiordma.loop.workers import WorkerPool
from aiordma.memory.buffer_pool import KEPT_BYTES
from aiordma.messages.message_data_path import MessageDataPath

SMALL = ConnectionOptions(recv_depth=4, max_message_size=64)
SMALLER = ConnectionOptions(recv_depth=2, max_message_size=64)


async def keep_open(connection: Connection) -> None:
    async for _ in connection:
        pass


@asynccontextmanager
async def memory_kept(simulation: Simulation) -> AsyncIterator[str]:
    """Serve, with a connection that stays open, and one that was closed and whose memory is kept.

    Yield the host.
    """
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        serving = loops.create_task(listener.serve(keep_open))
        async with aiordma.connect(host, PORT):
            async with aiordma.connect(host, PORT):
                await loops.sleep(1)
            await loops.sleep(1)
            yield host
        await loops.cancel(serving)


async def test_connecting_and_closing_takes_no_worker_threads(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None on each side: threads of C make the queue pair, disconnect, and destroy it.

    On iWARP, connecting blocks, and destroying the id that has connected: worker threads do it.
    """
    submit = WorkerPool.submit
    jobs = 0

    def count(pool: WorkerPool, job: Callable[[], None]) -> None:
        nonlocal jobs
        jobs += 1
        submit(pool, job)

    async with memory_kept(simulation) as host:
        monkeypatch.setattr(WorkerPool, "submit", count)
        async with aiordma.connect(host, PORT):
            await loops.sleep(1)
        await loops.sleep(1)
        assert jobs == (2 if simulation.near.is_iwarp else 0)


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
    large = ConnectionOptions(recv_depth=4, max_message_size=KEPT_BYTES)
    host = simulation.far.host
    async with aiordma.listen(host, PORT, options=large) as listener:
        serving = loops.create_task(listener.serve(keep_open))
        async with aiordma.connect(host, PORT):
            regions = simulation.world.all(Region)
            async with aiordma.connect(host, PORT, options=large):
                assert len(simulation.world.all(Region)) > len(regions)
            await loops.sleep(1)
            assert simulation.world.all(Region) == regions
        await loops.cancel(serving)


async def test_kept_receive_buffers_are_freed_if_memory_cannot_be_locked(
    simulation: Simulation,
) -> None:
    host = simulation.far.host
    async with aiordma.listen(host, PORT) as listener:
        serving = loops.create_task(listener.serve(keep_open))
        async with aiordma.connect(host, PORT):
            async with aiordma.connect(host, PORT, options=SMALL):
                pass
            await loops.sleep(1)
            kept = simulation.world.all(Region)
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
            async with aiordma.connect(host, PORT, options=SMALLER):
                assert [region for region in kept if region in simulation.world.all(Region)] != kept
        await loops.cancel(serving)


async def test_a_queue_pair_that_is_never_made_keeps_no_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All completion queues are full, and the worker that would make another one fails."""
    async with memory_kept(simulation) as host:
        before = len(simulation.world.all(Region))
        with monkeypatch.context() as patch:
            patch.setattr(LoopDevice, "try_reserve", lambda *arguments: None)
            patch.setattr(MessageDataPath, "prepare", fail)
            with pytest.raises(aiordma.VerbsError):
                await aiordma.connect(host, PORT)
        await loops.sleep(1)
        assert len(simulation.world.all(Region)) <= before


def fail(data_path: MessageDataPath) -> None:
    raise aiordma.VerbsError(errno.ENOMEM, "ibv_create_cq")
