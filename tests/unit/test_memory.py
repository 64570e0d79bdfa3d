"""The buffer pool, memory regions and their slices, and the peer's memory."""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import loops
import pytest
from helpers import SHARED
from simulator import Simulation
from simulator.pairs import connected
from simulator.verbs import Domain, Region, Window
from simulator.world import SlowCalls

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionOptions,
    LocalClosed,
    MemoryRegion,
    RemoteBuffer,
    VerbsError,
)
from aiordma.memory import SLAB_SIZE, BufferPool, MemoryPart, PartPool, PooledBuffer
from aiordma.memory.part_pool import LARGEST_PART, LARGEST_SLAB

LARGE = SLAB_SIZE  # one buffer in each slab
LOCAL = AccessFlags.LOCAL_WRITE


def lock(address: int, nbytes: int) -> None:
    """Lock pages in memory, as mlockall(2) does with all pages of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)), ctypes.get_errno()


class Pool:
    """A new BufferPool in the protection domain of a connection."""

    def __init__(self, simulation: Simulation, connection: Connection) -> None:
        endpoint = connection._endpoint
        self._world = simulation.world
        self.call = endpoint.cm.handle.call
        self.pd = endpoint.data_path._resources.loop_device.pd
        self.pool = BufferPool(endpoint.loop, self.pd)
        self.parts = PartPool(self.pd)
        self._before = len(simulation.world.all(Region))

    async def acquire(self, nbytes: int) -> PooledBuffer:
        return await self.pool.acquire(nbytes, self.call)

    async def take(self, nbytes: int) -> MemoryPart:
        return await self.call(lambda: self.parts.take(nbytes))

    async def give_back(self, *parts: MemoryPart) -> None:
        for part in parts:
            await self.call(partial(self.parts.give_back, part))

    @property
    def slabs(self) -> list[int]:
        """The sizes of the registered slabs."""
        return [region.length for region in self._world.all(Region)[self._before :]]


@asynccontextmanager
async def pool_of(simulation: Simulation) -> AsyncIterator[Pool]:
    async with connected(simulation) as pair:
        made = Pool(simulation, pair.near.connection)
        yield made
        for _ in range(2):
            made.pool.close()
            made.parts.close()
        assert made.slabs == []
        assert made.pool.try_acquire(100) is None


async def test_a_buffer_is_a_power_of_four_and_part_of_a_slab(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        sizes = {0: 1024, 1025: 4096, 4097: 16384, LARGE + 1: 4 * LARGE}
        for nbytes, size in sizes.items():
            assert p.pool.try_acquire(nbytes) is None
            buffer = await p.acquire(nbytes)
            assert (len(buffer.view), p.slabs[-1]) == (size, max(size, SLAB_SIZE))
            buffer.release()
        buffers: list[PooledBuffer] = []
        while (free := p.pool.try_acquire(1024)) is not None:
            free.view[:] = len(buffers).to_bytes(2, "big") * 512
            buffers.append(free)
        addresses = sorted(buffer.address for buffer in buffers)
        assert addresses == [*range(addresses[0], addresses[0] + SLAB_SIZE, 1024)]
        assert len({buffer.lkey for buffer in buffers}) == 1
        for number, buffer in enumerate(buffers):
            assert bytes(buffer.view) == number.to_bytes(2, "big") * 512
        buffers[0].release()
        assert await p.acquire(1) is buffers[0]
        assert len(p.slabs) == len(sizes)


async def test_parts_share_regions_that_become_larger(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        parts = [await p.take(1000) for _ in range(7)]
        assert p.slabs == [1024, 2048, 4096]
        for number, part in enumerate(parts):
            part.view[:] = bytes([number]) * 1000
        assert [bytes(part.view) for part in parts] == [bytes([n]) * 1000 for n in range(7)]
        assert len({part.address for part in parts}) == 7
        assert len({part.lkey for part in parts}) == 3
        assert not any(part.address % 64 for part in parts)
        large = [await p.take(LARGEST_PART + 1) for _ in range(2)]
        assert p.slabs == [1024, 2048, 4096, *[LARGEST_PART + 64] * 2]
        await p.give_back(*large)
        assert p.slabs == [1024, 2048, 4096]
        await p.give_back(parts[1])
        assert (await p.take(1000)).address == parts[1].address


async def test_a_region_is_freed_when_all_its_parts_are_free(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        parts = [await p.take(64) for _ in range(7)]
        await p.give_back(*parts[3:6])
        assert p.slabs == [64, 128, 256]
        await p.give_back(*parts[1:3])  # the last region still has a part in use
        assert p.slabs == [64, 256]
        await p.give_back(parts[6])  # the only region with free parts is kept
        assert p.slabs == [64, 256]
        await p.give_back(parts[0])
        assert p.slabs == [256]
        again = [await p.take(64) for _ in range(4)]
        assert p.slabs == [256]
        assert {part.address for part in again} == {part.address for part in parts[3:]}


async def test_regions_of_parts_have_a_limit(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        for _ in range(16):
            await p.take(LARGEST_PART // 2)
        assert p.slabs == [
            LARGEST_PART // 2,
            LARGEST_PART,
            LARGEST_PART * 2,
            LARGEST_SLAB,
            LARGEST_SLAB,
        ]


async def test_memory_that_cannot_be_registered_leaves_no_part(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
        with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
            await p.take(64)
        assert p.slabs == []
        await p.take(64)
        assert p.slabs == [64]


@pytest.mark.parametrize(("nbytes", "failures"), [(100, 5), (LARGE, 2)])
async def test_a_failed_growth_is_raised_in_each_task(
    simulation: Simulation, nbytes: int, failures: int
) -> None:
    async with pool_of(simulation) as p:
        for failure, code in ((OSError(errno.EAGAIN, "no"), errno.EAGAIN), (OSError("no"), 12)):
            fails = mock.patch.object(mmap, "mmap", side_effect=failure)
            with fails, pytest.raises(VerbsError) as caught:
                await p.acquire(nbytes)
            assert (caught.value.errno, caught.value.function) == (code, "mmap")
        for number in range(failures):
            after = number if nbytes == 100 else 3 + number
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM, after=after)
        tasks = [await loops.start(p.acquire(nbytes)) for _ in range(5)]
        results = await loops.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, VerbsError)]
        assert (len(errors), len({id(error) for error in errors})) == (failures, failures)
        assert "RLIMIT_MEMLOCK" in str(errors[0])
        assert await p.acquire(nbytes)


@pytest.mark.parametrize("when", ["waiting", "growing", "queued"])
async def test_a_cancelled_task_leaves_growth_to_others(simulation: Simulation, when: str) -> None:
    async with pool_of(simulation) as p:
        simulation.world.schedule = SlowCalls(ibv_reg_mr_iova2=1.0)
        if when == "queued":
            simulation.world.schedule.start = lambda: 1.0  # type: ignore[method-assign]
        tasks = [await loops.start(p.acquire(100)) for _ in range(3)]
        await loops.sleep(0.1)
        cancelled = tasks.pop(1 if when == "waiting" else 0)
        cancelled.cancel()
        await loops.wait([cancelled])
        assert len({buffer.address for buffer in await loops.gather(*tasks)}) == 2
        await loops.sleep(5)
        assert p.slabs == [SLAB_SIZE] * (1 if when == "waiting" else len(p.slabs))
        assert p.pool.free.nbytes == len(p.slabs) * SLAB_SIZE - 2 * 1024


async def test_slicing_a_region_returns_parts_of_it(simulation: Simulation) -> None:
    memory = bytearray(range(100))
    async with (
        connected(simulation) as pair,
        await pair.near.connection.register(memory, SHARED) as region,
    ):
        assert (len(region), region.access, region.registration.length) == (100, SHARED, 100)
        part = region[10:30]
        assert (part.addr, part.lkey, len(part)) == (region.addr + 10, region.lkey, 20)
        assert bytes(part[5:7].view) == bytes([15, 16])
        assert (region[-10:].start, len(region[200:]), len(region[5:2])) == (90, 0, 0)
        assert part.remote == region.remote[10:30] == RemoteBuffer(part.addr, region.rkey, 20)
        for whole in (region, region.remote):
            with pytest.raises(ValueError, match="without a step"):
                whole[::2]
        assert "10:30 of <MemoryRegion 100 bytes" in repr(part)


@pytest.mark.parametrize("how", ["dropped", "with", "aclose", "async with", "cancelled"])
async def test_a_closed_region_is_unregistered_at_last(simulation: Simulation, how: str) -> None:
    memory = bytearray(10)
    async with connected(simulation) as pair:
        regions = [await pair.near.connection.register(memory, LOCAL)]
        references, lkey = regions[0].references, regions[0].lkey
        references.acquire(regions[0].registration.pd)

        async def close() -> None:
            region = regions.pop()
            if how == "with":
                with region:
                    assert not region.closed
            elif how == "async with":
                async with region:
                    assert not region.closed
            elif how != "dropped":
                await region.aclose()
                assert repr(region) == "<MemoryRegion closed>"
                with pytest.raises(BufferError, match="closed"):
                    memoryview(region)

        task = loops.create_task(close())
        await loops.sleep(1)
        waits = how not in ("dropped", "with")
        assert (references.closed, task.done()) == (True, not waits)
        with pytest.raises(ValueError, match="closed"):
            references.acquire(None)
        if how == "cancelled":
            await loops.cancel(task)
        with pytest.raises(BufferError):
            memory.append(1)
        assert lkey in simulation.world.keys
        references.release()
        await (loops.sleep(1) if task.done() else task)
        assert lkey not in simulation.world.keys
        memory.append(1)


def test_a_region_of_a_dmabuf_has_no_bytes() -> None:
    def dispose(registration: object, on_disposed: Callable[[], None]) -> None:
        on_disposed()

    registration: Any = SimpleNamespace(address=0x10000, length=10, lkey=5, rkey=6, pd=None)
    region = MemoryRegion(registration, None, AccessFlags.REMOTE_READ, dispose)
    assert (len(region), len(region[2:5]), region.remote.length) == (10, 3, 10)
    with pytest.raises(BufferError):
        memoryview(region)
    with pytest.raises(BufferError):
        region[2:5].view  # noqa: B018
    region.close()


def test_the_numbers_of_a_remote_buffer_have_limits() -> None:
    remote = RemoteBuffer((1 << 64) - 1, (1 << 32) - 1, 100)
    assert remote.pack() == b"\xff" * 12 + b"\0\0\0\x64"
    assert RemoteBuffer.unpack(remote.pack() + b"more") == copy.copy(remote) == remote
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        RemoteBuffer.unpack(bytes(15))
    for numbers in ((-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, -1)):
        with pytest.raises(ValueError, match="not a number of"):
            RemoteBuffer(*numbers)


# --- a cancelled call that is under way in its thread ---


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_register_keeps_the_protection_domain_until_its_call_has_ended(
    simulation: Simulation, begun: bool
) -> None:
    """It is the last user: the connection ends before the call does."""
    async with connected(simulation) as pair:
        connection, world = pair.near.connection, simulation.world
        pointer = connection._endpoint.data_path._resources.loop_device.pd.pointer

        def domain_exists() -> bool:
            return any(domain.pointer == pointer for domain in world.all(Domain))

        world.calls.delay("ibv_reg_mr_iova2", before=5)
        registering = await loops.start(connection.register(bytearray(10)))
        if begun:
            await loops.sleep(1)
        await loops.cancel(registering)
        connection.abort()
        await connection.aclose()
        await loops.sleep(2)
        assert domain_exists() is begun
        await loops.sleep(5)
        assert not domain_exists()


@pytest.mark.transport("IB")  # iWARP has no memory windows
@pytest.mark.parametrize("end", ["cancel", "abort"])
async def test_a_window_is_closed_whose_bind_ends_during_its_allocation(
    simulation: Simulation, end: str
) -> None:
    async with connected(simulation) as pair:
        connection, calls = pair.near.connection, simulation.world.calls
        region = await connection.allocate(64, LOCAL | AccessFlags.MW_BIND)
        calls.delay("ibv_alloc_mw", before=1, after=1)
        binding = await loops.start(connection.bind(region))
        await loops.sleep(0.5)
        if end == "cancel":
            await loops.cancel(binding)
        connection.abort()
        if end == "abort":
            with pytest.raises(LocalClosed):
                await binding
        region.close()
        await connection.aclose()
        assert simulation.world.all(Window) == []


# --- processes that lock their memory ---


@pytest.mark.parametrize("own_domain", [False, True])
async def test_a_connection_with_locked_memory_is_closed(
    simulation: Simulation, own_domain: bool
) -> None:
    """Linux does not free locked pages before their mapping ends."""
    options = ConnectionOptions(
        own_protection_domain=own_domain, recv_depth=2, max_message_size=4096
    )
    async with connected(simulation, near=options) as pair:
        await pair.near.connection.send(bytes(1000))  # of the buffer pool
        for region in simulation.world.all(Region):
            lock(region.address, min(region.length, mmap.PAGESIZE))
        for end in (pair.near, pair.far):
            end.connection.abort()
            await loops.wait_for(end.connection.aclose(), 10)
    await loops.until(lambda: not simulation.world.all(Region), "everything to be released")
