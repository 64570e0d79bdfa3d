"""AwaitableContextManager: awaited, or entered and closed at the end of the block."""

from __future__ import annotations

import asyncio
import gc

import pytest

import aiordma
from aiordma.loop.context_managers import AwaitableContextManager

pytestmark = pytest.mark.asyncio


class FakeConnection:
    """An object that records how it is closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("aclose")

    def abort(self) -> None:
        self.calls.append("abort")


class UnclosableConnection(FakeConnection):
    async def aclose(self) -> None:
        raise OSError("closing failed")


def connect(connection: FakeConnection) -> AwaitableContextManager[FakeConnection]:
    async def open_connection() -> FakeConnection:
        await asyncio.sleep(0)
        return connection

    return AwaitableContextManager(open_connection())


def connect_refused() -> AwaitableContextManager[FakeConnection]:
    async def refuse() -> FakeConnection:
        raise ConnectionError("refused")

    return AwaitableContextManager(refuse())


async def test_an_awaited_object_stays_open() -> None:
    connection = FakeConnection()
    assert await connect(connection) is connection
    assert connection.calls == []


async def test_an_entered_object_is_closed_at_the_end() -> None:
    connection = FakeConnection()
    async with connect(connection) as entered:
        assert entered is connection
        assert connection.calls == []
    assert connection.calls == ["aclose"]


async def test_an_exception_in_the_block_closes_gracefully_and_is_raised() -> None:
    connection = FakeConnection()
    with pytest.raises(ValueError, match="no"):
        async with connect(connection):
            raise ValueError("no")
    assert connection.calls == ["aclose"]


async def test_cancelling_the_block_aborts_the_object() -> None:
    connection = FakeConnection()

    async def block() -> None:
        async with connect(connection):
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.calls == ["abort", "aclose"]


async def test_a_timeout_of_the_block_aborts_the_object() -> None:
    connection = FakeConnection()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), connect(connection):
            await asyncio.sleep(60)
    assert connection.calls == ["abort", "aclose"]


async def test_cancelling_while_opening_opens_nothing() -> None:
    connection = FakeConnection()

    async def block() -> None:
        async with connect(connection):
            raise AssertionError("it was opened")

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.calls == []


async def test_a_failure_to_open_is_raised_by_await_and_by_async_with() -> None:
    with pytest.raises(ConnectionError, match="refused"):
        await connect_refused()
    with pytest.raises(ConnectionError, match="refused"):
        async with connect_refused():
            raise AssertionError("it was opened")


async def test_a_failure_to_close_is_raised() -> None:
    with pytest.raises(OSError, match="closing failed"):
        async with connect(UnclosableConnection()):
            pass


async def test_awaiting_twice_raises() -> None:
    once = connect(FakeConnection())
    await once
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await once


async def test_a_task_can_open_an_object() -> None:
    connection = FakeConnection()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(connect(connection))
    assert await task is connection
    first, second = await asyncio.gather(connect(connection), connect(connection))
    assert first is second is connection
    assert connection.calls == []


async def test_a_task_of_connect_raises_what_connect_raises() -> None:
    for task in (
        asyncio.create_task(aiordma.connect("10.7.1.1", -1)),
        asyncio.create_task(aiordma.listen("10.7.1.1", -1)),
    ):
        with pytest.raises(ValueError, match="port -1 is not between"):
            await task


async def test_a_task_that_opens_an_object_can_be_cancelled() -> None:
    ended: list[BaseException] = []

    async def open_connection() -> FakeConnection:
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            ended.append(error)
            raise
        return FakeConnection()

    task = asyncio.create_task(AwaitableContextManager(open_connection()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in ended] == [asyncio.CancelledError]


async def test_close_without_await_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    unwanted = connect(FakeConnection())
    unwanted.close()
    del unwanted
    gc.collect()
    assert not recwarn.list


async def test_dropping_without_await_warns() -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        connect(FakeConnection())
