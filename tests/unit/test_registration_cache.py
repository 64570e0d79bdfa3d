"""RegistrationCache: buffers that stay registered while they are cached or in use."""

from __future__ import annotations

import array
import errno
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import connected
from simulator.verbs import Region
from simulator.world import SlowCalls

from aiordma import AccessFlags, LocalClosed, RegistrationCache, VerbsError

READ, WRITE = AccessFlags.REMOTE_READ, AccessFlags.LOCAL_WRITE


class Rig:
    """A cache, and the regions that its connection has registered."""

    def __init__(self, simulation: Simulation, connection: Any, max_bytes: int) -> None:
        self._world = simulation.world
        self._before = simulation.world.all(Region)
        self.cache = RegistrationCache(connection, max_bytes=max_bytes)
        self.memories: list[bytearray] = []

    async def use(self, buffer: Any, access: AccessFlags = WRITE) -> int:
        """Register `buffer`, close the region, and return its local key."""
        with await self.cache.register(buffer, access) as region:
            return region.lkey

    async def use_new(self, *sizes: int) -> list[int]:
        """Use new buffers of these sizes. Return their local keys."""
        keys = []
        for size in sizes:
            self.memories.append(bytearray(size))
            keys.append(await self.use(self.memories[-1]))
        return keys

    async def keys(self) -> list[int]:
        """Return the local keys of the registered buffers."""
        await loops.sleep(0.01)
        return [one.key for one in self._world.all(Region) if one not in self._before]

    async def state(self) -> tuple[int, int, int]:
        """Return the number of cached buffers, of cached bytes and of registered buffers."""
        return len(self.cache), self.cache.nbytes, len(await self.keys())


@asynccontextmanager
async def cache_of(simulation: Simulation, max_bytes: int = 1000) -> AsyncIterator[Rig]:
    async with connected(simulation) as pair:
        rig = Rig(simulation, pair.near.connection, max_bytes)
        yield rig
        for _ in range(2):
            rig.cache.close()
        assert await rig.state() == (0, 0, 0)


async def test_the_least_recently_used_buffer_is_dropped_first(simulation: Simulation) -> None:
    async with cache_of(simulation, 300) as rig:
        keys = await rig.use_new(100, 100, 100)
        await rig.use(rig.memories[0])
        keys += await rig.use_new(100)
        assert await rig.keys() == [keys[0], keys[2], keys[3]]
        await rig.use(rig.memories[0])
        keys += await rig.use_new(200)  # it evicts two
        assert await rig.keys() == [keys[0], keys[4]]
        assert await rig.use(rig.memories[1]) not in keys
        assert await rig.state() == (2, 300, 2)


async def test_a_buffer_in_use_is_not_evicted(simulation: Simulation) -> None:
    async with cache_of(simulation, 100) as rig:
        memories: list[Any] = [array.array("d", range(10)), bytearray(100), bytearray(101)]
        regions = [await rig.cache.register(memory, WRITE) for memory in memories]
        keys = [region.lkey for region in regions]
        assert await rig.state() == (3, 281, 3)
        regions[1].close()
        assert await rig.keys() == [keys[0], keys[2]]
        regions[0].acquire(regions[0].registration.pd)  # the device uses it
        regions[0].close()
        assert await rig.keys() == [keys[0], keys[2]]
        regions[0].release()
        assert await rig.keys() == [keys[2]]
        del regions[2]
        gc.collect()
        assert await rig.state() == (0, 0, 0)  # it is larger than the cache
        assert await rig.use(memories[2]) not in keys


async def test_a_discarded_buffer_is_dropped_with_its_last_region(simulation: Simulation) -> None:
    async with cache_of(simulation) as rig:
        memory = bytearray(100)
        region = await rig.cache.register(memory, WRITE)
        await rig.use(memory, READ)
        rig.cache.discard(memoryview(memory)[:50])  # unknown
        assert await rig.state() == (2, 200, 2)
        rig.cache.discard(memory)
        assert await rig.state() == (0, 0, 1)  # the one with the other access is not in use
        second = await rig.use(memory)  # a new registration
        region.close()
        assert await rig.keys() == [second]


@pytest.mark.parametrize("how", ["cancelled", "failed", "closed"])
async def test_registering_can_end_without_a_region(simulation: Simulation, how: str) -> None:
    async with cache_of(simulation) as rig:
        memory = bytearray(100)
        simulation.world.schedule = SlowCalls(ibv_reg_mr_iova2=1.0)
        if how == "failed":
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
        task = loops.create_task(rig.cache.register(memory, WRITE))
        await loops.sleep(0.1)
        if how == "closed":
            rig.cache.close()
        if how == "cancelled":
            task.cancel()
        with pytest.raises((VerbsError, LocalClosed, *loops.CancelledError)):
            await task
        await loops.sleep(2)
        assert await rig.state() == (0, 0, 0)
        if how == "failed":
            assert await rig.use(memory)


async def test_closing_unregisters_the_buffers_that_are_not_in_use(simulation: Simulation) -> None:
    async with cache_of(simulation) as rig:
        used = await rig.cache.register(bytearray(100), WRITE)
        await rig.use_new(50)
        rig.cache.close()
        assert (await rig.state(), used.closed) == ((0, 0, 1), False)
        used.close()
        with pytest.raises(ValueError, match="max_bytes is -1"):
            Rig(simulation, None, -1)
