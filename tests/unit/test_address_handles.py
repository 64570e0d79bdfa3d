"""AddressHandleCache: handles are created once, outlive their sends, and are all destroyed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from fakes.cm import FakeCm, fake_cm

from aiordma import AsyncCmId, LocalClosed, VerbsError
from aiordma.datagrams import address_handles
from aiordma.datagrams.address_handles import AddressHandleCache
from aiordma.datagrams.peer import AddressKey
from aiordma.loop import running_loop
from aiordma.verbs import AddressHandle, AddressHandleAttributes

pytestmark = pytest.mark.asyncio


class FakeHandle:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class HandleFactory:
    """A function that creates fake handles, and calls `during` before each."""

    def __init__(self) -> None:
        self.created: dict[AddressKey, list[FakeHandle]] = {}
        self.during: Callable[[], object] = lambda: None

    def __call__(self, key: AddressKey) -> AddressHandle:
        self.during()
        handle = FakeHandle()
        self.created.setdefault(key, []).append(handle)
        return handle  # type: ignore[return-value]

    @property
    def all(self) -> list[FakeHandle]:
        return [handle for handles in self.created.values() for handle in handles]


class Rig:
    """An AddressHandleCache that creates fake handles."""

    def __init__(self, cm: AsyncCmId) -> None:
        self.cm = cm
        self.create = HandleFactory()
        self.cache = AddressHandleCache(cm.handle, self.create)


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm: FakeCm = made
        rig = Rig(cm.make_id())
        yield rig
        await rig.cm.aclose()
        assert [handle.closed for handle in rig.create.all] == [1] * len(rig.create.all)


def key(number: int) -> AddressKey:
    return AddressHandleAttributes(dlid=number)


async def test_a_handle_is_created_once_for_each_key(rig: Rig) -> None:
    first = await rig.cache.acquire(key(1))
    assert await rig.cache.acquire(key(1)) is first
    assert first.count == 2
    assert await rig.cache.acquire(key(2)) is not first
    assert len(rig.create.all) == len(rig.cache) == 2


async def test_tasks_that_need_the_same_handle_share_one(rig: Rig) -> None:
    references = await asyncio.gather(*(rig.cache.acquire(key(1)) for _ in range(5)))
    assert len({id(each) for each in references}) == 1
    assert references[0].count == 5
    assert len(rig.create.all) == 1


async def test_a_slow_creation_does_not_delay_others(rig: Rig) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait()

    rig.create.during = wait
    slow = asyncio.create_task(rig.cache.acquire(key(1)))
    await asyncio.to_thread(begun.wait)
    rig.create.during = lambda: None
    await rig.cache.acquire(key(2))
    assert not slow.done()
    go.set()
    assert (await slow).count == 1


async def test_a_failure_raises_in_each_task_and_is_not_cached(rig: Rig) -> None:
    def fail() -> None:
        raise VerbsError(errno.ETIMEDOUT, "ibv_create_ah")

    rig.create.during = fail
    done = await asyncio.gather(
        *(rig.cache.acquire(key(1)) for _ in range(3)), return_exceptions=True
    )
    assert [type(each) for each in done] == [VerbsError] * 3
    rig.create.during = lambda: None
    assert (await rig.cache.acquire(key(1))).count == 1


async def test_the_least_recently_used_handle_is_evicted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_handles, "MAX_HANDLES", 2)
    for number in (1, 2, 1, 3):  # evicts 2
        (await rig.cache.acquire(key(number))).release()
    await rig.cm.handle.call(lambda: None)
    assert [rig.create.created[key(n)][0].closed for n in (1, 2, 3)] == [0, 1, 0]
    assert len(rig.cache) == 2
    await rig.cache.acquire(key(2))
    assert len(rig.create.created[key(2)]) == 2


async def test_an_evicted_handle_in_use_is_destroyed_after_its_last_release(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_handles, "MAX_HANDLES", 1)
    first = await rig.cache.acquire(key(1))
    await rig.cache.acquire(key(1))
    await rig.cache.acquire(key(2))
    handle = rig.create.created[key(1)][0]
    for closed in (0, 1):
        await rig.cm.handle.call(lambda: None)
        assert handle.closed == 0
        first.release()
        await rig.cm.handle.call(lambda: None)
        assert handle.closed == closed


async def test_a_handle_whose_task_was_cancelled_is_destroyed(rig: Rig) -> None:
    go = threading.Event()
    rig.create.during = go.wait
    acquiring = asyncio.create_task(rig.cache.acquire(key(1)))
    waiting = asyncio.create_task(rig.cache.acquire(key(1)))
    await asyncio.sleep(0.01)
    acquiring.cancel()
    await asyncio.sleep(0.01)
    rig.create.during = lambda: None
    go.set()
    assert (await waiting).count == 1
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    while len(rig.create.all) < 2:
        await asyncio.sleep(0.001)
    assert sorted(handle.closed for handle in rig.create.all) in ([0, 1], [0, 0])


async def test_acquire_after_closing_raises_local_closed(rig: Rig) -> None:
    await rig.cache.acquire(key(1))
    rig.cm.abort()
    with pytest.raises(LocalClosed):
        await rig.cache.acquire(key(2))
