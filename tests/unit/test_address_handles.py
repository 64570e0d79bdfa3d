"""AddressBook: handles are made once, outlive their sends, and are all destroyed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from cm_fakes import FakeCm, fake_cm

from aiordma import AsyncCmId, LocalClosed, VerbsError
from aiordma.datagrams import address_handles as handles
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


class Maker:
    """Makes handles, as slowly as it is told to."""

    def __init__(self) -> None:
        self.made: dict[AddressKey, list[FakeHandle]] = {}
        self.during: Callable[[], object] = lambda: None

    def __call__(self, way: AddressKey) -> AddressHandle:
        self.during()
        made = FakeHandle()
        self.made.setdefault(way, []).append(made)
        return made  # type: ignore[return-value]

    @property
    def all(self) -> list[FakeHandle]:
        return [made for several in self.made.values() for made in several]


class Rig:
    def __init__(self, cm: AsyncCmId) -> None:
        self.cm = cm
        self.make = Maker()
        self.book = AddressHandleCache(cm.handle, self.make)


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm: FakeCm = made
        rig = Rig(cm.make_id())
        yield rig
        await rig.cm.aclose()
        assert [handle.closed for handle in rig.make.all] == [1] * len(rig.make.all)


def way(number: int) -> AddressKey:
    return AddressHandleAttributes(dlid=number)


async def test_a_way_is_made_once(rig: Rig) -> None:
    first = await rig.book.acquire(way(1))
    assert await rig.book.acquire(way(1)) is first
    assert first.count == 2
    assert await rig.book.acquire(way(2)) is not first
    assert len(rig.make.all) == len(rig.book) == 2


async def test_those_who_want_the_same_wait_for_one(rig: Rig) -> None:
    borrowed = await asyncio.gather(*(rig.book.acquire(way(1)) for _ in range(5)))
    assert len({id(each) for each in borrowed}) == 1
    assert borrowed[0].count == 5
    assert len(rig.make.all) == 1


async def test_a_slow_one_does_not_hold_up_the_others(rig: Rig) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait()

    rig.make.during = wait
    slow = asyncio.create_task(rig.book.acquire(way(1)))
    await asyncio.to_thread(begun.wait)
    rig.make.during = lambda: None
    await rig.book.acquire(way(2))
    assert not slow.done()
    go.set()
    assert (await slow).count == 1


async def test_a_failure_is_everybodys_own_and_is_forgotten(rig: Rig) -> None:
    def fail() -> None:
        raise VerbsError(errno.ETIMEDOUT, "ibv_create_ah")

    rig.make.during = fail
    done = await asyncio.gather(
        *(rig.book.acquire(way(1)) for _ in range(3)), return_exceptions=True
    )
    assert [type(each) for each in done] == [VerbsError] * 3
    rig.make.during = lambda: None
    assert (await rig.book.acquire(way(1))).count == 1


async def test_the_one_not_used_for_longest_goes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_HANDLES", 2)
    for number in (1, 2, 1, 3):  # 2 goes
        (await rig.book.acquire(way(number))).release()
    await rig.cm.handle.call(lambda: None)
    assert [rig.make.made[way(n)][0].closed for n in (1, 2, 3)] == [0, 1, 0]
    assert len(rig.book) == 2
    await rig.book.acquire(way(2))
    assert len(rig.make.made[way(2)]) == 2


async def test_one_in_use_is_destroyed_when_it_no_longer_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "MAX_HANDLES", 1)
    first = await rig.book.acquire(way(1))
    await rig.book.acquire(way(1))
    await rig.book.acquire(way(2))
    handle = rig.make.made[way(1)][0]
    for closed in (0, 1):
        await rig.cm.handle.call(lambda: None)
        assert handle.closed == 0
        first.release()
        await rig.cm.handle.call(lambda: None)
        assert handle.closed == closed


async def test_a_cancelled_one_is_destroyed(rig: Rig) -> None:
    go = threading.Event()
    rig.make.during = go.wait
    borrowing = asyncio.create_task(rig.book.acquire(way(1)))
    waiting = asyncio.create_task(rig.book.acquire(way(1)))
    await asyncio.sleep(0.01)
    borrowing.cancel()
    await asyncio.sleep(0.01)
    rig.make.during = lambda: None
    go.set()
    assert (await waiting).count == 1
    with pytest.raises(asyncio.CancelledError):
        await borrowing
    while len(rig.make.all) < 2:
        await asyncio.sleep(0.001)
    assert sorted(handle.closed for handle in rig.make.all) in ([0, 1], [0, 0])


async def test_closing_ends_the_wait(rig: Rig) -> None:
    await rig.book.acquire(way(1))
    rig.cm.abort()
    with pytest.raises(LocalClosed):
        await rig.book.acquire(way(2))
