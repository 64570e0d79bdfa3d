"""The buffer pool, memory regions and their slices, and the peer's memory."""

from __future__ import annotations

import array
import copy
import errno
import gc
import mmap
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import connected
from simulator.verbs import Region
from simulator.world import SlowCalls

from aiordma import AccessFlags, Connection, MemoryRegion, RemoteBuffer, VerbsError
from aiordma.memory import SLAB_SIZE, AllocatedRegion, BufferPool, PooledBuffer

LARGE = SLAB_SIZE  # one buffer in each slab
LOCAL = AccessFlags.LOCAL_WRITE


class Pool:
    """A new BufferPool in the protection domain of a connection."""

    def __init__(self, simulation: Simulation, connection: Connection) -> None:
        endpoint = connection._endpoint
        self._world = simulation.world
        self._call = endpoint.cm.handle.call
        self.pd = endpoint.data_path._resources.loop_device.pd
        self.pool = BufferPool(endpoint.loop, self.pd)
        self._before = len(simulation.world.all(Region))

    async def acquire(self, nbytes: int) -> PooledBuffer:
        return await self.pool.acquire(nbytes, self._call)

    async def start(self, nbytes: int) -> loops.Task[PooledBuffer]:
        task = loops.create_task(self.acquire(nbytes))
        await loops.settle()
        return task

    @property
    def slabs(self) -> list[int]:
        """The sizes of the registered slabs."""
        return [region.length for region in self._world.all(Region)[self._before :]]

    def slow(self) -> None:
        """Let registering take a second."""
        self._world.schedule = SlowCalls(ibv_reg_mr_iova2=1.0)


@asynccontextmanager
async def pool_of(simulation: Simulation) -> AsyncIterator[Pool]:
    async with connected(simulation) as pair:
        made = Pool(simulation, pair.near.connection)
        yield made
        for _ in range(2):
            made.pool.close()
        assert made.slabs == []
        assert made.pool.try_acquire(100) is None


# --- the buffer pool ---


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, 1024), (1024, 1024), (1025, 4096), (4097, 16384), (LARGE + 1, 4 * LARGE)],
)
async def test_a_buffer_is_the_next_power_of_four(
    simulation: Simulation, nbytes: int, size: int
) -> None:
    async with pool_of(simulation) as p:
        assert p.pool.try_acquire(nbytes) is None
        assert len((await p.acquire(nbytes)).view) == size
        assert p.slabs == [max(size, SLAB_SIZE)]


async def test_the_buffers_of_a_slab_are_adjacent_and_used_again(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        first = await p.acquire(100)
        buffers = [first]
        while (buffer := p.pool.try_acquire(1024)) is not None:
            buffers.append(buffer)
        for number, buffer in enumerate(buffers):
            buffer.view[:] = number.to_bytes(2, "big") * 512
        addresses = sorted(buffer.address for buffer in buffers)
        assert addresses == [*range(addresses[0], addresses[0] + SLAB_SIZE, 1024)]
        assert {buffer.lkey for buffer in buffers} == {first.lkey}
        for number, buffer in enumerate(buffers):
            assert bytes(buffer.view) == number.to_bytes(2, "big") * 512
        first.release()
        assert await p.acquire(1) is first
        assert p.slabs == [SLAB_SIZE]


async def test_tasks_that_need_the_same_size_wait_for_one_slab(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        tasks = [await p.start(nbytes) for nbytes in (100, LARGE, 100, 4 * LARGE, LARGE)]
        buffers = await loops.gather(*tasks)
        assert len({buffer.address for buffer in buffers}) == 5
        assert sorted(p.slabs) == [LARGE, LARGE, LARGE, 4 * LARGE]


async def test_a_released_buffer_goes_to_a_waiting_task(simulation: Simulation) -> None:
    async with pool_of(simulation) as p:
        first = await p.acquire(LARGE)
        p.slow()
        tasks = [await p.start(LARGE) for _ in range(2)]
        await loops.sleep(0.1)
        first.release()
        assert first in await loops.gather(*tasks)
        assert p.slabs == [LARGE] * 2


@pytest.mark.parametrize(("nbytes", "failures"), [(100, 5), (LARGE, 2)])
async def test_a_failed_growth_is_raised_in_each_task_without_a_buffer(
    simulation: Simulation, nbytes: int, failures: int
) -> None:
    async with pool_of(simulation) as p:
        for number in range(failures):
            after = number if nbytes == 100 else 3 + number
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM, after=after)
        tasks = [await p.start(nbytes) for _ in range(5)]
        results = await loops.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, VerbsError)]
        assert (len(errors), len({id(error) for error in errors})) == (failures, failures)
        assert "RLIMIT_MEMLOCK" in str(errors[0])
        assert await p.acquire(nbytes)


@pytest.mark.parametrize("when", ["waiting", "growing", "queued"])
async def test_a_cancelled_task_leaves_the_growth_to_others(
    simulation: Simulation, when: str
) -> None:
    async with pool_of(simulation) as p:
        p.slow()
        if when == "queued":
            simulation.world.schedule.start = lambda: 1.0  # type: ignore[method-assign]
        tasks = [await p.start(100) for _ in range(3)]
        await loops.sleep(0.1)
        cancelled = tasks.pop(1 if when == "waiting" else 0)
        cancelled.cancel()
        await loops.wait([cancelled])
        assert len({buffer.address for buffer in await loops.gather(*tasks)}) == 2
        await loops.sleep(5)
        assert p.slabs == [SLAB_SIZE] * (1 if when == "waiting" else len(p.slabs))
        free = sum(len(buffers) for buffers in p.pool._free.values())
        assert free == len(p.slabs) * SLAB_SIZE // 1024 - 2


@pytest.mark.parametrize(("code", "raised"), [(errno.EAGAIN, errno.EAGAIN), (None, errno.ENOMEM)])
async def test_a_failed_mmap_is_a_verbs_error(
    simulation: Simulation, code: int | None, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fileno: int, length: int) -> None:
        raise OSError(code, "no") if code is not None else OSError("no")

    async with pool_of(simulation) as p:
        with pytest.raises(VerbsError, match="mmap: Cannot allocate memory") as caught:
            AllocatedRegion(p.pd, 1 << 62, LOCAL)
        assert (caught.value.errno, caught.value.function) == (errno.ENOMEM, "mmap")
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", fail)
            with pytest.raises(VerbsError) as caught:
                await p.acquire(100)
        assert (caught.value.errno, caught.value.function) == (raised, "mmap")
        assert await p.acquire(100)


# --- regions ---


@asynccontextmanager
async def region_of(
    simulation: Simulation, memory: bytearray | array.array[float]
) -> AsyncIterator[MemoryRegion]:
    async with connected(simulation) as pair:
        region = await pair.near.connection.register(memory, LOCAL)
        yield region
        region.close()


async def test_slicing_a_region_returns_parts_of_it(simulation: Simulation) -> None:
    memory = bytearray(range(100))
    async with region_of(simulation, memory) as region:
        view = memoryview(region)
        view[0] = 77
        view.release()
        assert (memory[0], len(region), region.access) == (77, 100, LOCAL)
        with pytest.raises(BufferError):
            memory.append(1)
        part = region[10:30]
        assert (part.addr, part.lkey, len(part)) == (region.addr + 10, region.lkey, 20)
        assert bytes(part[5:7].view) == bytes([15, 16])
        assert (region[-10:].start, len(region[200:]), len(region[5:2])) == (90, 0, 0)
        assert part.remote == RemoteBuffer(region.addr + 10, region.rkey, 20)
        assert region.remote[10:30] == part.remote
        with pytest.raises(ValueError, match="without a step"):
            region[::2]
        assert "10:30 of <MemoryRegion 100 bytes" in repr(part)
        assert region.registration.length == 100


async def test_a_region_counts_bytes_whatever_the_items_are(simulation: Simulation) -> None:
    async with region_of(simulation, array.array("d", [1.0, 2.0])) as region:
        assert (len(region), memoryview(region).format, len(region[8:].view)) == (16, "d", 8)


@pytest.mark.parametrize("how", ["close", "with", "dropped", "aclose", "async with", "cancelled"])
async def test_a_closed_region_is_unregistered_after_its_last_use(
    simulation: Simulation, how: str
) -> None:
    memory = bytearray(10)
    async with connected(simulation) as pair:
        region = await pair.near.connection.register(memory, LOCAL)
        references, lkey = region.references, region.lkey
        references.acquire(region.registration.pd)
        task: loops.Task[None] | None = None
        match how:
            case "with":
                with region:
                    assert not region.closed
            case "async with" | "aclose" | "cancelled":

                async def close() -> None:
                    if how == "async with":
                        async with region:
                            return
                    await region.aclose()

                task = loops.create_task(close())
            case "close":
                region.close()
        if how == "dropped":
            del region
            gc.collect()
        await loops.sleep(1)
        assert references.closed
        with pytest.raises(ValueError, match="closed"):
            references.acquire(None)
        if how == "cancelled" and task is not None:
            task.cancel()
            await loops.wait([task])
        assert task is None or task.done() is (how == "cancelled")
        with pytest.raises(BufferError):
            memory.append(1)
        assert lkey in simulation.world.keys
        references.release()
        if task is not None and how != "cancelled":
            await task
            memory.append(1)
        await loops.sleep(1)
        assert lkey not in simulation.world.keys
        memory.append(1)
        if how in ("close", "with", "aclose"):
            await region.aclose()
            assert repr(region) == "<MemoryRegion closed>"
            with pytest.raises(BufferError, match="closed"):
                memoryview(region)


async def test_closing_an_alias_does_not_unregister_the_memory(simulation: Simulation) -> None:
    released: list[str] = []
    async with region_of(simulation, bytearray(b"0123456789")) as region:
        alias = region.alias(lambda: released.append("released"))
        assert (alias.segment, alias.rkey, alias.access) == (
            region.segment, region.rkey, region.access,
        )  # fmt: skip
        assert bytes(memoryview(alias)) == b"0123456789"
        alias.acquire(region.registration.pd)
        alias.close()
        assert (released, alias.closed, region.closed) == ([], True, False)
        alias.release()
        assert released == ["released"]
        async with region.alias(lambda: released.append("again")):
            assert len(released) == 1
        assert released[1:] == ["again"]
        region.acquire(region.registration.pd)
        region.release()


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


async def test_memory_that_cannot_be_registered_is_refused(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        connection = pair.near.connection
        cases: list[tuple[Any, AccessFlags, type[Exception], str]] = [
            (b"", LOCAL, ValueError, "an empty buffer"),
            (b"read-only", LOCAL, ValueError, "a read-only buffer"),
            (bytearray(1), AccessFlags.ON_DEMAND, ValueError, "no on-demand paging"),
            (memoryview(bytearray(8))[::2], LOCAL, BufferError, "not contiguous"),
        ]
        for buffer, access, error, why in cases:
            with pytest.raises(error, match=why):
                await connection.register(buffer, access)
        for nbytes, kind in ((0, ValueError), (1 << 62, MemoryError)):
            with pytest.raises(kind, match="cannot be allocated"):
                await connection.allocate(nbytes)
        for part in ((-1, 5), (0, 0)):
            with pytest.raises(ValueError, match="cannot be registered"):
                await connection.register_dmabuf(0, *part)
        simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
        with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
            await connection.register(bytearray(10))
        async with await connection.register(b"sent only", AccessFlags.REMOTE_READ) as region:
            assert memoryview(region).readonly


# --- the peer's memory ---


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
