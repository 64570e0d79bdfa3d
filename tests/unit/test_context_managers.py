"""Opening: awaited or entered, and closed as the block ends."""

from __future__ import annotations

import asyncio
import gc

import pytest

import aiordma
from aiordma.loop.context_managers import AwaitableContextManager

pytestmark = pytest.mark.asyncio


class Door:
    """Something to close, that writes down how it was."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("aclose")

    def abort(self) -> None:
        self.calls.append("abort")


class Failing(Door):
    async def aclose(self) -> None:
        raise OSError("it is stuck")


def opening(door: Door) -> AwaitableContextManager[Door]:
    async def unlock() -> Door:
        await asyncio.sleep(0)
        return door

    return AwaitableContextManager(unlock())


def refusal() -> AwaitableContextManager[Door]:
    async def refuse() -> Door:
        raise ConnectionError("locked")

    return AwaitableContextManager(refuse())


async def test_awaited_it_stays_open() -> None:
    door = Door()
    assert await opening(door) is door
    assert door.calls == []


async def test_entered_it_is_closed_at_the_end() -> None:
    door = Door()
    async with opening(door) as entered:
        assert entered is door
        assert door.calls == []
    assert door.calls == ["aclose"]


async def test_an_exception_closes_it_gracefully_and_goes_on() -> None:
    door = Door()
    with pytest.raises(ValueError, match="no"):
        async with opening(door):
            raise ValueError("no")
    assert door.calls == ["aclose"]


async def test_cancelling_the_block_aborts_it() -> None:
    door = Door()

    async def block() -> None:
        async with opening(door):
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door.calls == ["abort", "aclose"]


async def test_a_timeout_of_the_block_aborts_it() -> None:
    door = Door()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), opening(door):
            await asyncio.sleep(60)
    assert door.calls == ["abort", "aclose"]


async def test_cancelling_the_opening_opens_nothing() -> None:
    door = Door()

    async def block() -> None:
        async with opening(door):
            raise AssertionError("it was opened")

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door.calls == []


async def test_what_cannot_be_opened_raises_either_way() -> None:
    with pytest.raises(ConnectionError, match="locked"):
        await refusal()
    with pytest.raises(ConnectionError, match="locked"):
        async with refusal():
            raise AssertionError("it was opened")


async def test_a_failure_to_close_is_seen() -> None:
    with pytest.raises(OSError, match="stuck"):
        async with opening(Failing()):
            pass


async def test_it_opens_once() -> None:
    once = opening(Door())
    await once
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await once


async def test_a_task_can_open_it() -> None:
    door = Door()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(opening(door))
    assert await task is door
    assert await asyncio.gather(opening(door), opening(door)) == [door, door]
    assert door.calls == []


async def test_a_task_of_connect_raises_what_connect_raises() -> None:
    for task in (
        asyncio.create_task(aiordma.connect("10.7.1.1", -1)),
        asyncio.create_task(aiordma.listen("10.7.1.1", -1)),
    ):
        with pytest.raises(ValueError, match="port -1 is not between"):
            await task


async def test_a_task_that_opens_it_can_be_cancelled() -> None:
    ended: list[BaseException] = []

    async def unlock() -> Door:
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            ended.append(error)
            raise
        return Door()

    task = asyncio.create_task(AwaitableContextManager(unlock()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in ended] == [asyncio.CancelledError]


async def test_one_that_is_not_wanted_can_be_closed(recwarn: pytest.WarningsRecorder) -> None:
    unwanted = opening(Door())
    unwanted.close()
    del unwanted
    gc.collect()
    assert not recwarn.list


async def test_one_that_is_dropped_is_noticed() -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        opening(Door())
