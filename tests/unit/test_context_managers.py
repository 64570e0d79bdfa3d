"""AwaitableContextManager: awaited, or entered and closed at the end of the block."""

from __future__ import annotations

import asyncio
import gc

import pytest

from aiordma.loop.context_managers import AwaitableContextManager

pytestmark = pytest.mark.asyncio


class Recorder:
    """An object that records how it is closed. Opening waits once, and raises `failure` if any."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure

    def open(self) -> AwaitableContextManager[Recorder]:
        async def opening() -> Recorder:
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
            return self

        return AwaitableContextManager(opening())

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("aclose")

    def abort(self) -> None:
        self.calls.append("abort")


async def test_an_awaited_object_stays_open() -> None:
    recorder = Recorder()
    once = recorder.open()
    assert await once is recorder
    assert recorder.calls == []
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await once


async def test_an_entered_object_is_closed_at_the_end() -> None:
    recorder = Recorder()
    async with recorder.open() as entered:
        assert entered is recorder
        assert recorder.calls == []
    assert recorder.calls == ["aclose"]


async def test_an_exception_in_the_block_closes_gracefully_and_is_raised() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="no"):
        async with recorder.open():
            raise ValueError("no")
    assert recorder.calls == ["aclose"]


async def test_cancelling_the_block_aborts_the_object() -> None:
    recorder, entered = Recorder(), asyncio.Event()

    async def block() -> None:
        async with recorder.open():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorder.calls == ["abort", "aclose"]


async def test_a_task_that_opens_an_object_can_be_cancelled() -> None:
    recorder = Recorder()
    task = asyncio.create_task(recorder.open())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first, second = await asyncio.gather(recorder.open(), recorder.open())
    assert first is second is recorder
    assert recorder.calls == []


async def test_a_failure_to_open_is_raised_by_await_and_by_async_with() -> None:
    recorder = Recorder(ConnectionError("refused"))
    with pytest.raises(ConnectionError, match="refused"):
        await recorder.open()
    with pytest.raises(ConnectionError, match="refused"):
        async with recorder.open():
            raise AssertionError("it was opened")


async def test_an_object_that_is_not_opened_warns_unless_it_is_closed(
    recwarn: pytest.WarningsRecorder,
) -> None:
    unwanted = Recorder().open()
    unwanted.close()
    del unwanted
    gc.collect()
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="never awaited"):
        Recorder().open()
