"""Operations: a request is posted, waited for and ended; its memory is released once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest
from fakes.qp import FakeCallbacks, SendRig, no_polling

from aiordma import LocalClosed, PeerClosed, RdmaError, VerbsError, WorkRequestError
from aiordma.enums import SendFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.loop import running_loop
from aiordma.qp import Operation
from aiordma.qp.operation import READS_AND_ATOMICS, Operations

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]


class Rig(SendRig):
    """Operations on the send queue of a SendRig."""

    def __init__(self, depth: int = 16) -> None:
        super().__init__(depth=depth)
        self.callbacks = FakeCallbacks()
        self.operations = Operations(running_loop(), self.queue, self.callbacks, no_polling())
        self.releases = 0

    def release_memory(self) -> None:
        self.releases += 1

    @staticmethod
    def post(qp: Any, wr_id: int, flags: int) -> None:
        qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)

    def perform(self, opcode: WcOpcode = WcOpcode.RDMA_WRITE) -> asyncio.Task[None]:
        return asyncio.create_task(self.operations.perform(opcode, self.post, self.release_memory))

    async def start(self, opcode: WcOpcode = WcOpcode.RDMA_WRITE) -> asyncio.Task[None]:
        task = self.perform(opcode)
        await settle()
        assert self.qp.posted
        return task

    def complete_oldest(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Complete the oldest request, as MessageDataPath.complete() does."""
        memory = self.queue.completed(self.qp.posted.popleft())
        if isinstance(memory, Operation):
            memory.succeeded = status is WcStatus.SUCCESS
            if status is not WcStatus.SUCCESS:
                self.callbacks.fail(WorkRequestError(status, memory.opcode))

    def next_is_fenced(self) -> bool:
        self.send()
        return bool(self.qp.flags[max(self.qp.flags)] & SendFlags.FENCE)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_operation_ends_with_its_completion() -> None:
    rig = Rig()
    task = await rig.start()
    assert not task.done()
    assert rig.releases == 0
    rig.complete_oldest()
    await task
    assert rig.releases == 1
    assert rig.callbacks.failures == []


async def test_each_operation_is_woken_by_its_own_completion() -> None:
    rig = Rig()
    first, second = await rig.start(), await rig.start()
    rig.complete_oldest()
    await settle()
    assert (first.done(), second.done(), rig.releases) == (True, False, 1)
    rig.complete_oldest()
    await second
    assert rig.releases == 2


async def test_a_failed_operation_raises_why_the_connection_ended() -> None:
    rig = Rig()
    task = await rig.start()
    rig.complete_oldest(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(WorkRequestError, match="RDMA_WRITE failed: REM_ACCESS_ERR"):
        await task
    assert rig.releases == 1


async def test_a_flushed_operation_raises_why_the_connection_ended() -> None:
    rig = Rig()
    first, second = await rig.start(), await rig.start()
    rig.complete_oldest(WcStatus.REM_ACCESS_ERR)
    rig.complete_oldest(WcStatus.WR_FLUSH_ERR)
    for task in (first, second):
        with pytest.raises(WorkRequestError, match="REM_ACCESS_ERR"):
            await task
    assert rig.releases == 2


async def test_a_failed_operation_waits_until_the_reason_is_known() -> None:
    rig = Rig()
    rig.callbacks.reason_known.clear()
    task = await rig.start(WcOpcode.RDMA_READ)
    rig.complete_oldest(WcStatus.WR_FLUSH_ERR)
    await settle()
    assert not task.done()
    assert rig.releases == 1
    rig.callbacks.end = PeerClosed("closed there")
    rig.callbacks.reason_known.set()
    with pytest.raises(PeerClosed):
        await task
    assert not rig.next_is_fenced()


async def test_a_successful_operation_does_not_wait_for_the_reason() -> None:
    rig = Rig()
    rig.callbacks.reason_known.clear()
    task = await rig.start()
    rig.complete_oldest()
    await task


async def test_stop_waiting_wakes_the_waiter_and_abandon_releases_the_memory() -> None:
    rig = Rig()
    task = await rig.start()
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.queue.stop_waiting()
    with pytest.raises(PeerClosed):
        await task
    assert rig.releases == 0  # the device might still use it
    rig.queue.abandon()
    assert rig.releases == 1
    rig.queue.abandon()
    assert rig.releases == 1


async def test_on_an_ended_connection_nothing_is_posted() -> None:
    rig = Rig(depth=1)
    rig.callbacks.closed_here = True
    for _ in range(3):
        with pytest.raises(LocalClosed):
            await rig.perform()
    assert rig.releases == 3
    assert not rig.qp.posted
    assert rig.queue.try_reserve()  # no credit was lost


async def test_a_connection_that_ends_while_an_operation_waits_for_a_credit() -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform()
    await settle()
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.queue.wake_senders()
    with pytest.raises(PeerClosed):
        await task
    assert rig.releases == 1
    assert len(rig.qp.posted) == 1


async def test_an_operation_that_waits_for_a_credit_is_posted_when_there_is_one() -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform()
    await settle()
    assert rig.queue.stats.send_waits == 1
    rig.complete_oldest()
    await settle()
    rig.complete_oldest()
    await task
    assert rig.releases == 1


@pytest.mark.parametrize("opcode", WcOpcode)
async def test_cancelling_the_wait_for_a_credit_posts_nothing(opcode: WcOpcode) -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform(opcode)
    await settle()
    await cancel(task)
    assert rig.releases == 1
    rig.complete_oldest()
    assert not rig.next_is_fenced()
    assert len(rig.qp.sent) == 2


async def test_a_refused_request_ends_the_connection_and_keeps_its_memory() -> None:
    rig = Rig(depth=1)
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send") as caught:
        await rig.perform()
    assert caught.value.errno == errno.EINVAL
    assert len(rig.callbacks.failures) == 1
    assert rig.releases == 0  # the device might use it nevertheless
    assert rig.queue.try_reserve()
    rig.queue.abandon()
    assert rig.releases == 1


async def test_a_refused_request_raises_what_post_failed_returns() -> None:
    rig = Rig()
    rig.callbacks.end = None
    rig.callbacks.post_failed = lambda error: PeerClosed("closed there")  # type: ignore[method-assign]
    rig.qp.refuses = True
    with pytest.raises(PeerClosed):
        await rig.perform()


async def test_another_error_while_posting_releases_the_memory() -> None:
    def post(qp: object, wr_id: int, flags: int) -> None:
        raise ValueError("the memory window is closed")

    rig = Rig(depth=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="closed"):
            await rig.operations.perform(WcOpcode.BIND_MW, post, rig.release_memory)
    assert rig.releases == 3
    assert rig.callbacks.failures == []
    assert rig.queue.try_reserve()


@pytest.mark.parametrize("opcode", sorted(READS_AND_ATOMICS))
async def test_after_a_cancelled_read_requests_are_fenced_until_it_has_ended(
    opcode: WcOpcode,
) -> None:
    rig = Rig()
    task = await rig.start(opcode)
    assert not rig.next_is_fenced()
    await cancel(task)
    assert rig.next_is_fenced()
    assert rig.releases == 0
    rig.complete_oldest()
    assert rig.releases == 1
    assert not rig.next_is_fenced()


@pytest.mark.parametrize("opcode", sorted(set(WcOpcode) - READS_AND_ATOMICS))
async def test_after_other_cancelled_operations_nothing_is_fenced(opcode: WcOpcode) -> None:
    rig = Rig()
    task = await rig.start(opcode)
    await cancel(task)
    assert not rig.next_is_fenced()
    rig.complete_oldest()
    assert rig.releases == 1


async def test_requests_are_fenced_until_the_last_cancelled_read_has_ended() -> None:
    rig = Rig()
    tasks = [await rig.start(WcOpcode.RDMA_READ) for _ in range(3)]
    await cancel(tasks[0])
    await cancel(tasks[2])
    rig.complete_oldest()
    assert rig.next_is_fenced()
    rig.complete_oldest()
    await tasks[1]
    assert rig.next_is_fenced()
    rig.complete_oldest()
    assert not rig.next_is_fenced()
    assert rig.releases == 3


async def test_a_read_that_ended_before_it_was_cancelled_leaves_no_fence() -> None:
    rig = Rig()
    task = await rig.start(WcOpcode.RDMA_READ)
    rig.complete_oldest()
    await cancel(task)
    assert not rig.next_is_fenced()
    assert rig.releases == 1


async def test_abandon_releases_the_memory_of_a_cancelled_read() -> None:
    rig = Rig()
    await cancel(await rig.start(WcOpcode.RDMA_READ))
    rig.queue.abandon()
    assert rig.releases == 1


async def test_a_completion_after_stop_waiting_releases_nothing_twice() -> None:
    rig = Rig()
    task = await rig.start()
    rig.callbacks.fail(RdmaError("the device forgot it"))
    rig.queue.stop_waiting()
    with pytest.raises(RdmaError, match="forgot"):
        await task
    rig.complete_oldest()
    rig.queue.abandon()
    assert rig.releases == 1


class Polling:
    """A BusyPoll that polls once: the test can complete the request or cancel the task."""

    is_on = True
    nanoseconds = 5_000

    def __init__(self) -> None:
        self.on_poll: Callable[[], None] = lambda: None
        self.polls: list[bool] = []
        self.gate: asyncio.Event | None = None

    async def until(self, is_over: Callable[[], bool], nanoseconds: int) -> None:
        assert nanoseconds == self.nanoseconds
        self.on_poll()
        self.polls.append(is_over())
        if self.gate is not None:
            await self.gate.wait()


def polling(rig: Rig) -> Polling:
    busy = Polling()
    rig.operations._busy = busy  # type: ignore[assignment]
    return busy


async def test_a_completion_found_by_polling_needs_no_loop_iteration() -> None:
    rig = Rig()
    busy = polling(rig)
    busy.on_poll = rig.complete_oldest
    waiting = rig.operations.perform(WcOpcode.RDMA_READ, rig.post, rig.release_memory)
    with pytest.raises(StopIteration):  # it never waits
        waiting.send(None)
    assert busy.polls == [True]
    assert rig.releases == 1


async def test_a_read_that_is_cancelled_while_polling_is_fenced() -> None:
    rig = Rig()
    busy = polling(rig)
    busy.gate = asyncio.Event()
    await cancel(await rig.start(WcOpcode.RDMA_READ))
    assert busy.polls == [False]
    assert rig.next_is_fenced()
    rig.complete_oldest()
    assert not rig.next_is_fenced()
