"""RegistrationCache: buffers that stay registered while they are cached or in use."""

from __future__ import annotations

import array
import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import AccessFlags, LocalClosed, MemoryRegion, RegistrationCache, VerbsError
from aiordma.memory import address_and_length

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

READ, WRITE = AccessFlags.REMOTE_READ, AccessFlags.LOCAL_WRITE


class FakeRegistration:
    def __init__(self, buffer: Any, number: int) -> None:
        self.address, self.length = address_and_length(buffer)
        self.lkey, self.rkey, self.pd = number, number + 100, None


class FakeConnection:
    """A connection that records the buffers which are registered now, by their number."""

    def __init__(self) -> None:
        self.made = 0
        self.registered: dict[int, Any] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None

    async def register(self, buffer: Any, access: AccessFlags) -> MemoryRegion:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.made += 1
        number = self.made
        registration: Any = FakeRegistration(buffer, number)
        self.registered[number] = memoryview(buffer)  # exports the buffer, as a registration does

        def dispose(registration: object, on_disposed: Callable[[], None]) -> None:
            del self.registered[number]
            on_disposed()

        return MemoryRegion(registration, buffer, access, dispose)


class Rig:
    """A cache on a FakeConnection."""

    def __init__(self, max_bytes: int = 1000) -> None:
        self.connection = FakeConnection()
        connection: Any = self.connection
        self.cache = RegistrationCache(connection, max_bytes=max_bytes)

    async def use(self, buffer: Any, access: AccessFlags = WRITE) -> int:
        """Register `buffer`, close the region, and return its local key."""
        with await self.cache.register(buffer, access) as region:
            return region.lkey

    @property
    def state(self) -> tuple[int, int, int]:
        """The cached buffers, the cached bytes, and the buffers that are registered."""
        return len(self.cache), self.cache.nbytes, len(self.connection.registered)


async def test_the_same_buffer_is_registered_once() -> None:
    rig, memory = Rig(), bytearray(100)
    first = await rig.cache.register(memory, WRITE)
    second = await rig.cache.register(memory, WRITE)
    assert (first.lkey, first.addr, len(first)) == (second.lkey, address_and_length(memory)[0], 100)
    first.close()
    second.close()
    assert await rig.use(memory) == 1
    assert rig.state == (1, 100, 1)
    assert rig.connection.made == 1


async def test_another_view_of_the_same_memory_is_the_same_buffer() -> None:
    rig, memory = Rig(), array.array("d", range(10))
    keys = [await rig.use(view) for view in (memory, memoryview(memory), memoryview(memory)[:10])]
    assert keys == [1, 1, 1]


async def test_other_memory_or_access_is_another_buffer() -> None:
    rig, memory = Rig(), bytearray(100)
    view = memoryview(memory)
    keys = [await rig.use(part) for part in (memory, view[:50], view[50:], bytearray(100))]
    keys.append(await rig.use(memory, WRITE | READ))
    assert keys == [1, 2, 3, 4, 5]
    assert rig.state == (5, 400, 5)


async def test_a_cached_buffer_stays_exported() -> None:
    rig, memory = Rig(), bytearray(100)
    await rig.use(memory)
    with pytest.raises(BufferError):
        memory.append(0)
    rig.cache.discard(memory)
    memory.append(0)


async def test_the_least_recently_used_buffer_is_unregistered_first() -> None:
    rig, memories = Rig(300), [bytearray(100) for _ in range(5)]
    for memory in memories[:3]:
        await rig.use(memory)
    await rig.use(memories[0])
    await rig.use(memories[3])
    assert list(rig.connection.registered) == [1, 3, 4]
    assert rig.state == (3, 300, 3)
    assert await rig.use(memories[1]) == 5
    assert list(rig.connection.registered) == [1, 4, 5]


async def test_a_large_buffer_evicts_several_small_ones() -> None:
    rig = Rig(300)
    memories = [bytearray(100) for _ in range(3)]
    for memory in memories:
        await rig.use(memory)
    await rig.use(bytearray(200))
    assert list(rig.connection.registered) == [3, 4]
    assert rig.state == (2, 300, 2)


async def test_a_buffer_in_use_is_not_evicted() -> None:
    rig, memories = Rig(100), [bytearray(100) for _ in range(3)]
    regions = [await rig.cache.register(memory, WRITE) for memory in memories]
    assert rig.state == (3, 300, 3)
    regions[1].close()
    assert list(rig.connection.registered) == [1, 3]
    regions[0].close()
    assert list(rig.connection.registered) == [3]
    regions[2].close()
    assert rig.state == (1, 100, 1)


async def test_a_buffer_larger_than_the_cache_is_evicted_after_its_use() -> None:
    rig = Rig(100)
    region = await rig.cache.register(bytearray(101), WRITE)
    assert rig.state == (1, 101, 1)
    region.close()
    assert rig.state == (0, 0, 0)


async def test_with_max_bytes_0_nothing_stays_registered() -> None:
    rig, memory = Rig(0), bytearray(10)
    assert [await rig.use(memory) for _ in range(2)] == [1, 2]
    assert rig.state == (0, 0, 0)


async def test_a_buffer_that_the_device_uses_is_not_evicted() -> None:
    rig, memory = Rig(0), bytearray(10)
    region = await rig.cache.register(memory, WRITE)
    region.acquire(None)
    region.close()
    assert rig.state == (1, 10, 1)
    region.release()
    assert rig.state == (0, 0, 0)


async def test_a_discarded_buffer_is_unregistered_with_its_last_region() -> None:
    rig, memory = Rig(), bytearray(100)
    regions = [await rig.cache.register(memory, WRITE) for _ in range(2)]
    await rig.use(memory, READ)
    rig.cache.discard(memory)
    assert rig.state == (0, 0, 1)  # the registration with the other access is not in use
    assert await rig.use(memory) == 3  # a new registration
    regions[0].close()
    assert list(rig.connection.registered) == [1, 3]
    regions[1].close()
    assert list(rig.connection.registered) == [3]
    assert rig.state == (1, 100, 1)


async def test_discarding_an_unknown_buffer_is_no_error() -> None:
    rig, memory = Rig(), bytearray(100)
    await rig.use(memory)
    rig.cache.discard(bytearray(100))
    rig.cache.discard(memoryview(memory)[:50])
    assert rig.state == (1, 100, 1)


async def test_a_dropped_region_releases_its_buffer() -> None:
    rig, memory = Rig(0), bytearray(100)
    region: MemoryRegion | None = await rig.cache.register(memory, WRITE)
    assert region is not None
    del region
    gc.collect()
    assert rig.state == (0, 0, 0)


async def test_tasks_that_register_the_same_buffer_concurrently_share_a_registration() -> None:
    rig, memory = Rig(), bytearray(100)
    rig.connection.gate.clear()
    tasks = [asyncio.create_task(rig.cache.register(memory, WRITE)) for _ in range(5)]
    await asyncio.sleep(0)
    rig.connection.gate.set()
    regions = await asyncio.gather(*tasks)
    assert len({region.lkey for region in regions}) == 1
    assert rig.state == (1, 100, 1)
    for region in regions:
        region.close()
    assert rig.state == (1, 100, 1)
    rig.cache.close()
    assert rig.state == (0, 0, 0)


async def test_a_failure_to_register_is_raised_and_not_cached() -> None:
    rig, memory = Rig(), bytearray(100)
    rig.connection.failure = VerbsError(12, "ibv_reg_mr")
    with pytest.raises(VerbsError, match="ibv_reg_mr"):
        await rig.cache.register(memory, WRITE)
    assert rig.state == (0, 0, 0)
    rig.connection.failure = None
    assert await rig.use(memory) == 1


async def test_cancelled_register_leaves_nothing_registered() -> None:
    rig, memory = Rig(0), bytearray(100)
    rig.connection.gate.clear()
    task = asyncio.create_task(rig.cache.register(memory, WRITE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.state == (0, 0, 0)


async def test_closing_unregisters_the_buffers_that_are_not_in_use() -> None:
    rig = Rig()
    used = await rig.cache.register(bytearray(100), WRITE)
    await rig.use(bytearray(50))
    with rig.cache:
        pass
    assert rig.state == (0, 0, 1)
    assert not used.closed
    used.close()
    assert rig.state == (0, 0, 0)
    rig.cache.close()
    with pytest.raises(LocalClosed):
        await rig.cache.register(bytearray(1), WRITE)


async def test_closing_while_a_buffer_is_being_registered() -> None:
    rig = Rig()
    rig.connection.gate.clear()
    task = asyncio.create_task(rig.cache.register(bytearray(100), WRITE))
    await asyncio.sleep(0)
    rig.cache.close()
    rig.connection.gate.set()
    with pytest.raises(LocalClosed):
        await task
    assert rig.state == (0, 0, 0)


async def test_negative_max_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes is -1"):
        Rig(-1)
