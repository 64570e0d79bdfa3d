"""MemoryRegion, MemorySlice and RemoteBuffer, without a device."""

from __future__ import annotations

import array
import asyncio
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import AccessFlags, MemoryRegion, RemoteBuffer


class FakeDomain:
    """A protection domain. Only its identity matters."""


HERE: Any = FakeDomain()
ELSEWHERE: Any = FakeDomain()


class FakeRegistration:
    def __init__(self, buffer: bytearray | array.array[float]) -> None:
        self.address, self.lkey, self.rkey = 0x10000, 5, 6
        self.length = memoryview(buffer).nbytes
        self.pd = HERE


@pytest.fixture
def disposed() -> list[object]:
    return []


def region_of(buffer: bytearray | array.array[float], disposed: list[object]) -> MemoryRegion:
    registration: Any = FakeRegistration(buffer)
    access = AccessFlags.LOCAL_WRITE

    def dispose(registration: object, on_disposed: Callable[[], None]) -> None:
        disposed.append(registration)
        on_disposed()

    return MemoryRegion(registration, buffer, access, dispose)


def test_a_region_exports_the_memory_of_the_buffer(disposed: list[object]) -> None:
    memory = bytearray(b"0123456789")
    region = region_of(memory, disposed)
    view = memoryview(region)
    view[0] = ord("x")
    assert memory == b"x123456789"
    assert (len(region), region.addr, region.lkey, region.rkey) == (10, 0x10000, 5, 6)
    with pytest.raises(BufferError):
        memory.append(1)


def test_a_region_counts_bytes_whatever_the_items_are(disposed: list[object]) -> None:
    region = region_of(array.array("d", [1.0, 2.0]), disposed)
    assert len(region) == 16
    assert memoryview(region).format == "d"
    assert len(region[8:].view) == 8


def test_slicing_a_region_returns_parts_of_it(disposed: list[object]) -> None:
    region = region_of(bytearray(range(100)), disposed)
    part = region[10:30]
    assert (part.addr, part.lkey, len(part)) == (0x1000A, 5, 20)
    assert bytes(part[5:7].view) == bytes([15, 16])
    assert (region[-10:].start, len(region[200:]), len(region[5:2])) == (90, 0, 0)
    assert part.remote == RemoteBuffer(0x1000A, 6, 20)
    assert region.remote[10:30] == part.remote
    with pytest.raises(ValueError, match="without a step"):
        region[::2]


def test_close_unregisters_after_the_last_release(disposed: list[object]) -> None:
    memory = bytearray(10)
    region = region_of(memory, disposed)
    region.acquire(HERE)
    region.acquire(HERE)
    region.close()
    assert region.closed
    with pytest.raises(ValueError, match="closed"):
        region.acquire(HERE)
    region.release()
    assert disposed == []
    region.release()
    region.close()
    assert len(disposed) == 1
    with pytest.raises(BufferError, match="closed"):
        memoryview(region)
    memory.append(1)


@pytest.mark.parametrize("pd", [ELSEWHERE, None])
def test_a_region_of_another_domain_is_refused(pd: Any, disposed: list[object]) -> None:
    region = region_of(bytearray(10), disposed)
    with pytest.raises(ValueError, match="registered on another device, or by another event loop"):
        region.acquire(pd)
    region.close()
    assert len(disposed) == 1  # no request uses it


def test_the_end_of_a_block_and_dropping_close_a_region(disposed: list[object]) -> None:
    with region_of(bytearray(1), disposed) as region:
        assert not region.closed
    assert len(disposed) == 1
    region_of(bytearray(1), disposed)
    gc.collect()
    assert len(disposed) == 2


class SlowDispose:
    """A dispose function that records each call. A test calls the recorded callbacks later."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def __call__(self, registration: object, on_disposed: Callable[[], None]) -> None:
        self.callbacks.append(on_disposed)

    def region_of(self, memory: bytearray) -> MemoryRegion:
        registration: Any = FakeRegistration(memory)
        return MemoryRegion(registration, memory, AccessFlags.LOCAL_WRITE, self)


@pytest.mark.asyncio
async def test_aclose_waits_for_the_last_release_and_for_unregistering() -> None:
    dispose = SlowDispose()
    region = dispose.region_of(bytearray(10))
    region.acquire(HERE)
    tasks = [asyncio.create_task(region.aclose()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert region.closed
    assert dispose.callbacks == []
    region.release()
    await asyncio.sleep(0.01)
    assert len(dispose.callbacks) == 1
    assert not any(task.done() for task in tasks)
    dispose.callbacks[0]()
    await asyncio.gather(*tasks)
    await region.aclose()
    assert len(dispose.callbacks) == 1


@pytest.mark.asyncio
async def test_the_end_of_an_async_block_waits_for_unregistering(disposed: list[object]) -> None:
    memory = bytearray(10)
    async with region_of(memory, disposed) as region:
        assert not region.closed
    assert len(disposed) == 1
    memory.append(1)


@pytest.mark.asyncio
async def test_cancelling_aclose_stops_the_waiting_only() -> None:
    dispose = SlowDispose()
    region = dispose.region_of(bytearray(10))
    task = asyncio.create_task(region.aclose())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert region.closed
    dispose.callbacks[0]()
    await region.aclose()


def test_closing_an_alias_does_not_unregister_the_memory(disposed: list[object]) -> None:
    memory, released = bytearray(b"0123456789"), list[str]()
    region = region_of(memory, disposed)
    alias = region.alias(lambda: released.append("released"))
    assert (alias.addr, alias.lkey, alias.rkey, len(alias)) == (0x10000, 5, 6, 10)
    assert alias.access == region.access
    assert bytes(memoryview(alias)) == b"0123456789"
    alias.acquire(HERE)
    alias.close()
    assert released == []
    alias.release()
    assert released == ["released"]
    assert disposed == []
    assert not region.closed
    with pytest.raises(ValueError, match="closed"):
        alias.acquire(HERE)
    region.acquire(HERE)
    region.release()


@pytest.mark.asyncio
async def test_the_end_of_an_async_block_waits_for_the_release_of_an_alias(
    disposed: list[object],
) -> None:
    region, released = region_of(bytearray(10), disposed), list[str]()
    async with region.alias(lambda: released.append("released")):
        assert released == []
    assert released == ["released"]
    assert disposed == []


def test_a_region_of_a_dmabuf_has_no_bytes() -> None:
    registration: Any = FakeRegistration(bytearray(10))
    region = MemoryRegion(registration, None, AccessFlags.REMOTE_READ, SlowDispose())
    assert (len(region), len(region[2:5]), region.remote.length) == (10, 3, 10)
    with pytest.raises(BufferError):
        memoryview(region)
    with pytest.raises(BufferError):
        region[2:5].view  # noqa: B018
    region.close()


def test_a_remote_buffer_can_be_packed_and_pickled() -> None:
    remote = RemoteBuffer((1 << 64) - 1, (1 << 32) - 1, 100)
    assert remote.pack() == b"\xff" * 12 + b"\0\0\0\x64"
    assert RemoteBuffer.unpack(remote.pack() + b"more") == remote
    assert pickle.loads(pickle.dumps(remote)) == copy.copy(remote) == remote
    assert remote[:10].length == 10
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        RemoteBuffer.unpack(bytes(15))
    with pytest.raises(ValueError, match="without a step"):
        remote[::2]


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, -1)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a number of"):
        RemoteBuffer(*numbers)
