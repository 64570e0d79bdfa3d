"""AllocatedRegion and BufferPool, on a protection domain that registers nothing."""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
from collections.abc import Callable

import pytest

from aiordma import VerbsError
from aiordma.enums import AccessFlags
from aiordma.loop import run_in_worker, running_loop
from aiordma.memory import SLAB_SIZE, AllocatedRegion, BufferPool, PooledBuffer
from aiordma.memory import buffer_pool as buffer_pool_module

pytestmark = pytest.mark.asyncio

TIME_LIMIT = 10
LARGE = SLAB_SIZE  # a slab of its own for each buffer


class FakeDomain:
    """A domain that records the registrations and their threads. Beyond `limit`, ENOMEM."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: list[threading.Thread] = []
        self.limit = 1000
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self.inside: list[int] = []
        self.most_inside: dict[int, int] = {}

    def register(self, nbytes: int) -> int:
        with self._lock:
            self.inside.append(nbytes)
            self.most_inside[nbytes] = max(
                self.most_inside.get(nbytes, 0), self.inside.count(nbytes)
            )
        assert self.gate.wait(TIME_LIMIT)
        with self._lock:
            self.inside.remove(nbytes)
            if len(self.sizes) >= self.limit:
                raise VerbsError(errno.ENOMEM, "ibv_reg_mr")
            self.sizes.append(nbytes)
            self.threads.append(threading.current_thread())
            return len(self.sizes)


class FakeRegistration:
    def __init__(self, pd: FakeDomain, buffer: mmap.mmap, access: AccessFlags) -> None:
        assert access is AccessFlags.LOCAL_WRITE
        number = pd.register(len(buffer))
        self.address, self.lkey, self.rkey = number << 40, number, number + 100
        self._pd = pd

    def close(self) -> None:
        self._pd.closed += 1


@pytest.fixture
def pd(monkeypatch: pytest.MonkeyPatch) -> FakeDomain:
    monkeypatch.setattr(buffer_pool_module, "Registration", FakeRegistration)
    return FakeDomain()


def make_pool(pd: FakeDomain) -> BufferPool:
    return BufferPool(running_loop(), pd)  # type: ignore[arg-type]


async def call(function: Callable[[], None]) -> None:
    await run_in_worker(running_loop(), function)


def acquiring(pool: BufferPool, nbytes: int) -> asyncio.Task[PooledBuffer]:
    return asyncio.create_task(pool.acquire(nbytes, call))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        while not condition():
            await asyncio.sleep(0.001)


# --- one buffer ---


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, 1024), (1, 1024), (1024, 1024), (1025, 4096), (4097, 16384), (LARGE + 1, 4 * LARGE)],
)
async def test_the_size_of_a_buffer_is_the_next_power_of_four(
    pd: FakeDomain, nbytes: int, size: int
) -> None:
    pool = make_pool(pd)
    buffer = await pool.acquire(nbytes, call)
    assert len(buffer.view) == size
    assert pd.sizes == [max(size, SLAB_SIZE)]


async def test_an_empty_pool_grows_in_another_thread(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    assert pool.try_acquire(100) is None
    await pool.acquire(100, call)
    assert pd.threads != [threading.current_thread()]
    assert pool.try_acquire(100) is not None
    assert pool.try_acquire(2000) is None


async def test_a_free_buffer_is_acquired_without_growing(pd: FakeDomain) -> None:
    async def never(function: Callable[[], None]) -> None:
        raise AssertionError("the pool grew")

    pool = make_pool(pd)
    first = await pool.acquire(100, call)
    assert await pool.acquire(100, never) is not first
    first.release()
    assert pool.try_acquire(100) is first


async def test_the_buffers_of_a_slab_are_adjacent(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pool.grow(1024)
    buffers: list[PooledBuffer] = []
    while (buffer := pool.try_acquire(1024)) is not None:
        buffer.view[:] = len(buffers).to_bytes(2, "big") * 512
        buffers.append(buffer)
    assert len(buffers) == SLAB_SIZE // 1024
    assert sorted(buffer.address for buffer in buffers) == [
        (1 << 40) + offset for offset in range(0, SLAB_SIZE, 1024)
    ]
    assert {buffer.lkey for buffer in buffers} == {1}
    for number, buffer in enumerate(buffers):
        assert bytes(buffer.view) == number.to_bytes(2, "big") * 512


# --- many tasks acquire a buffer ---


async def test_tasks_that_find_the_pool_empty_grow_it_once(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    buffers = await asyncio.gather(*(acquiring(pool, 100) for _ in range(200)))
    assert pd.sizes == [SLAB_SIZE]
    assert len({buffer.address for buffer in buffers}) == 200


async def test_tasks_that_acquire_large_buffers_grow_the_pool_one_after_the_other(
    pd: FakeDomain,
) -> None:
    pool = make_pool(pd)
    buffers = await asyncio.gather(*(acquiring(pool, LARGE) for _ in range(20)))
    assert pd.sizes == [LARGE] * 20
    assert pd.most_inside == {LARGE: 1}
    assert len({buffer.address for buffer in buffers}) == 20


async def test_growths_of_different_sizes_run_concurrently(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    tasks = [acquiring(pool, nbytes) for nbytes in (LARGE, 4 * LARGE, LARGE, 4 * LARGE)]
    await eventually(lambda: sorted(pd.inside) == [LARGE, 4 * LARGE])
    pd.gate.set()
    buffers = await asyncio.gather(*tasks)
    assert [len(buffer.view) for buffer in buffers] == [LARGE, 4 * LARGE] * 2


async def test_a_released_buffer_is_acquired_by_a_waiting_task(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    first = await pool.acquire(LARGE, call)
    pd.gate.clear()
    tasks = [acquiring(pool, LARGE) for _ in range(2)]
    await eventually(lambda: pd.inside == [LARGE])
    first.release()
    pd.gate.set()
    buffers = await asyncio.gather(*tasks)
    assert first in buffers
    assert len(pd.sizes) == 2


# --- failing ---


async def test_a_failure_to_register_is_raised_in_each_task(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.limit = 0
    tasks = [acquiring(pool, 100) for _ in range(5)]
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIME_LIMIT)
    assert [type(error) for error in errors] == [VerbsError] * 5
    assert len({id(error) for error in errors}) == 5
    assert "RLIMIT_MEMLOCK" in str(errors[0])
    pd.limit = 1
    assert await pool.acquire(100, call)


async def test_acquired_buffers_stay_valid_when_the_next_growth_fails(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.limit = 3
    tasks = [acquiring(pool, LARGE) for _ in range(5)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIME_LIMIT)
    assert sum(isinstance(result, PooledBuffer) for result in results) == 3
    assert sum(isinstance(result, VerbsError) for result in results) == 2


# --- cancelling ---


async def test_buffers_of_a_cancelled_growth_stay_in_the_pool(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    task = acquiring(pool, 100)
    await eventually(lambda: pd.inside == [SLAB_SIZE])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pd.gate.set()
    await eventually(lambda: pool.try_acquire(100) is not None)
    assert await pool.acquire(100, call)
    assert pd.sizes == [SLAB_SIZE]


async def test_when_a_growing_task_is_cancelled_another_task_grows_the_pool(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    first, *others = (acquiring(pool, LARGE) for _ in range(4))
    await eventually(lambda: pd.inside == [LARGE])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await eventually(lambda: pd.inside == [LARGE, LARGE])
    await asyncio.sleep(0.01)
    assert pd.inside == [LARGE, LARGE]  # the abandoned call of grow(), and the new one
    pd.gate.set()
    buffers = await asyncio.wait_for(asyncio.gather(*others), TIME_LIMIT)
    assert len({buffer.address for buffer in buffers}) == 3
    assert len(pd.sizes) <= 4


async def test_a_growth_cancelled_before_it_began_is_made_by_another_task(pd: FakeDomain) -> None:
    async def queued(function: Callable[[], None]) -> None:
        await run_in_worker(running_loop(), function, jobs.append)

    pool, jobs = make_pool(pd), list[Callable[[], None]]()
    first = asyncio.create_task(pool.acquire(100, queued))
    await eventually(lambda: len(jobs) == 1)
    others = [acquiring(pool, 100) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(asyncio.gather(*others), TIME_LIMIT)
    assert first.cancelled()
    jobs.pop()()
    assert pd.sizes == [SLAB_SIZE]


async def test_a_task_that_waits_for_a_growth_can_be_cancelled(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    growing, waiting, other = (acquiring(pool, 100) for _ in range(3))
    await eventually(lambda: pd.inside == [SLAB_SIZE])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not growing.done()
    pd.gate.set()
    assert await growing is not await other
    assert pd.sizes == [SLAB_SIZE]
    assert len(pool._free[1024]) == SLAB_SIZE // 1024 - 2


# --- regions ---


async def test_a_failure_of_mmap_is_raised_as_a_verbs_error(pd: FakeDomain) -> None:
    with pytest.raises(VerbsError, match="mmap: Cannot allocate memory") as caught:
        AllocatedRegion(pd, 1 << 62, AccessFlags.LOCAL_WRITE)  # type: ignore[arg-type]
    assert (caught.value.errno, caught.value.function) == (errno.ENOMEM, "mmap")
    assert isinstance(caught.value.__cause__, OSError)
    assert pd.sizes == []


@pytest.mark.parametrize(("code", "expected"), [(errno.EAGAIN, errno.EAGAIN), (None, errno.ENOMEM)])
async def test_the_error_of_mmap_is_kept(
    pd: FakeDomain, code: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fileno: int, length: int) -> None:
        raise OSError(code, "no") if code is not None else OSError("no")

    pool = make_pool(pd)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(VerbsError) as caught:
            await pool.acquire(100, call)
    assert (caught.value.errno, caught.value.function) == (expected, "mmap")
    assert await pool.acquire(100, call)


async def test_closing_a_pool_unregisters_each_slab_once(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    for nbytes in (100, 5000, LARGE, LARGE):
        await pool.acquire(nbytes, call)
    pool.close()
    pool.close()
    assert pd.closed == len(pd.sizes) == 4
    assert pool.try_acquire(100) is None
