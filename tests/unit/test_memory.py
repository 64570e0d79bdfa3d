"""AllocatedRegion and BufferPool, on a fake protection domain."""

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
from aiordma.memory import SLAB_SIZE, AllocatedRegion, BufferPool, PooledBuffer, buffer_pool

pytestmark = pytest.mark.asyncio

TIME_LIMIT = 10
LARGE = SLAB_SIZE  # one buffer in each slab


class FakeDomain:
    """Records the registrations and their threads. Fails with ENOMEM beyond `limit` slabs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: list[threading.Thread] = []
        self.limit = 1000
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self.in_progress: list[int] = []
        self.most_in_progress: dict[int, int] = {}

    def register(self, nbytes: int) -> int:
        with self._lock:
            self.in_progress.append(nbytes)
            self.most_in_progress[nbytes] = max(
                self.most_in_progress.get(nbytes, 0), self.in_progress.count(nbytes)
            )
        assert self.gate.wait(TIME_LIMIT)
        with self._lock:
            self.in_progress.remove(nbytes)
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
    monkeypatch.setattr(buffer_pool, "Registration", FakeRegistration)
    return FakeDomain()


def make_pool(pd: FakeDomain) -> BufferPool:
    return BufferPool(running_loop(), pd)  # type: ignore[arg-type]


async def call(function: Callable[[], None]) -> None:
    await run_in_worker(running_loop(), function)


def start_acquire(pool: BufferPool, nbytes: int) -> asyncio.Task[PooledBuffer]:
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
async def test_a_buffer_is_the_next_power_of_four(pd: FakeDomain, nbytes: int, size: int) -> None:
    pool = make_pool(pd)
    buffer = await pool.acquire(nbytes, call)
    assert len(buffer.view) == size
    assert pd.sizes == [max(size, SLAB_SIZE)]


async def test_an_empty_pool_grows_in_a_worker_thread(pd: FakeDomain) -> None:
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


# --- several tasks ---


async def test_many_tasks_grow_an_empty_pool_once(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    buffers = await asyncio.gather(*(start_acquire(pool, 100) for _ in range(200)))
    assert pd.sizes == [SLAB_SIZE]
    assert len({buffer.address for buffer in buffers}) == 200


async def test_many_large_buffers_are_made_one_after_another(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    buffers = await asyncio.gather(*(start_acquire(pool, LARGE) for _ in range(20)))
    assert pd.sizes == [LARGE] * 20
    assert pd.most_in_progress == {LARGE: 1}
    assert len({buffer.address for buffer in buffers}) == 20


async def test_growing_for_one_size_does_not_delay_other_sizes(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    tasks = [start_acquire(pool, nbytes) for nbytes in (LARGE, 4 * LARGE, LARGE, 4 * LARGE)]
    await eventually(lambda: sorted(pd.in_progress) == [LARGE, 4 * LARGE])
    pd.gate.set()
    buffers = await asyncio.gather(*tasks)
    assert [len(buffer.view) for buffer in buffers] == [LARGE, 4 * LARGE] * 2


async def test_a_released_buffer_goes_to_a_waiting_task(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    first = await pool.acquire(LARGE, call)
    pd.gate.clear()
    tasks = [start_acquire(pool, LARGE) for _ in range(2)]
    await eventually(lambda: pd.in_progress == [LARGE])
    first.release()
    pd.gate.set()
    buffers = await asyncio.gather(*tasks)
    assert first in buffers
    assert len(pd.sizes) == 2


# --- failing ---


async def test_a_failed_growth_is_raised_in_each_waiting_task(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.limit = 0
    tasks = [start_acquire(pool, 100) for _ in range(5)]
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIME_LIMIT)
    assert [type(error) for error in errors] == [VerbsError] * 5
    assert len({id(error) for error in errors}) == 5
    assert "RLIMIT_MEMLOCK" in str(errors[0])
    pd.limit = 1
    assert await pool.acquire(100, call)


async def test_a_failed_growth_leaves_the_buffers_of_other_tasks(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.limit = 3
    tasks = [start_acquire(pool, LARGE) for _ in range(5)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIME_LIMIT)
    assert sum(isinstance(result, PooledBuffer) for result in results) == 3
    assert sum(isinstance(result, VerbsError) for result in results) == 2


# --- cancelling ---


async def test_a_cancelled_growth_leaves_its_buffers_in_the_pool(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    task = start_acquire(pool, 100)
    await eventually(lambda: pd.in_progress == [SLAB_SIZE])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pd.gate.set()
    await eventually(lambda: pool.try_acquire(100) is not None)
    assert await pool.acquire(100, call)
    assert pd.sizes == [SLAB_SIZE]


async def test_another_task_grows_the_pool_after_a_cancelled_one(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    first, *others = (start_acquire(pool, LARGE) for _ in range(4))
    await eventually(lambda: pd.in_progress == [LARGE])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await eventually(lambda: pd.in_progress == [LARGE, LARGE])
    await asyncio.sleep(0.01)
    assert pd.in_progress == [LARGE, LARGE]  # the cancelled growth, and that of another task
    pd.gate.set()
    buffers = await asyncio.wait_for(asyncio.gather(*others), TIME_LIMIT)
    assert len({buffer.address for buffer in buffers}) == 3
    assert len(pd.sizes) <= 4


async def test_a_growth_cancelled_before_it_began_is_done_by_another_task(pd: FakeDomain) -> None:
    async def queued(function: Callable[[], None]) -> None:
        await run_in_worker(running_loop(), function, jobs.append)

    pool, jobs = make_pool(pd), list[Callable[[], None]]()
    first = asyncio.create_task(pool.acquire(100, queued))
    await eventually(lambda: len(jobs) == 1)
    others = [start_acquire(pool, 100) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(asyncio.gather(*others), TIME_LIMIT)
    assert first.cancelled()
    jobs.pop()()
    assert pd.sizes == [SLAB_SIZE]


async def test_cancelling_a_waiting_task_does_not_stop_the_growth(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    pd.gate.clear()
    grower, waiting, other = (start_acquire(pool, 100) for _ in range(3))
    await eventually(lambda: pd.in_progress == [SLAB_SIZE])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not grower.done()
    pd.gate.set()
    assert await grower is not await other
    assert pd.sizes == [SLAB_SIZE]
    assert len(pool._free[1024]) == SLAB_SIZE // 1024 - 2


# --- regions ---


async def test_a_failed_mmap_is_a_verbs_error(pd: FakeDomain) -> None:
    with pytest.raises(VerbsError, match="mmap: Cannot allocate memory") as caught:
        AllocatedRegion(pd, 1 << 62, AccessFlags.LOCAL_WRITE)  # type: ignore[arg-type]
    assert (caught.value.errno, caught.value.function) == (errno.ENOMEM, "mmap")
    assert isinstance(caught.value.__cause__, OSError)
    assert pd.sizes == []


@pytest.mark.parametrize(("code", "raised"), [(errno.EAGAIN, errno.EAGAIN), (None, errno.ENOMEM)])
async def test_the_errno_of_mmap_is_kept(
    pd: FakeDomain, code: int | None, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fileno: int, length: int) -> None:
        raise OSError(code, "no") if code is not None else OSError("no")

    pool = make_pool(pd)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(VerbsError) as caught:
            await pool.acquire(100, call)
    assert (caught.value.errno, caught.value.function) == (raised, "mmap")
    assert await pool.acquire(100, call)


async def test_closing_a_pool_unregisters_each_slab_once(pd: FakeDomain) -> None:
    pool = make_pool(pd)
    for nbytes in (100, 5000, LARGE, LARGE):
        await pool.acquire(nbytes, call)
    pool.close()
    pool.close()
    assert pd.closed == len(pd.sizes) == 4
    assert pool.try_acquire(100) is None
