"""Operations: a request is posted, waited for and ended; what was lent comes back once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest
from qp_fakes import FakeCallbacks, SendRig, no_polling

from aiordma import LocalClosed, PeerClosed, RdmaError, VerbsError, WorkRequestError
from aiordma.enums import SendFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.loop import running_loop
from aiordma.qp import Operation
from aiordma.qp.operation import READS_AND_ATOMICS, Operations

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]


class Rig(SendRig):
    """Operations on a send queue on fakes."""

    def __init__(self, depth: int = 16) -> None:
        super().__init__(depth=depth)
        self.owner = FakeCallbacks()
        self.operations = Operations(running_loop(), self.queue, self.owner, no_polling())
        self.given_back = 0

    def give_back(self) -> None:
        self.given_back += 1

    @staticmethod
    def post(qp: Any, wr_id: int, flags: int) -> None:
        qp.post_list(wr_id, WrOpcode.RDMA_WRITE, [], flags=flags)

    def perform(self, opcode: WcOpcode = WcOpcode.RDMA_WRITE) -> asyncio.Task[None]:
        return asyncio.create_task(self.operations.perform(opcode, self.post, self.give_back))

    async def under_way(self, opcode: WcOpcode = WcOpcode.RDMA_WRITE) -> asyncio.Task[None]:
        task = self.perform(opcode)
        await settle()
        assert self.qp.posted
        return task

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        """The device ends the oldest request: as Traffic takes its completion."""
        lent = self.queue.completed(self.qp.posted.popleft())
        if isinstance(lent, Operation):
            lent.succeeded = status is WcStatus.SUCCESS
            if status is not WcStatus.SUCCESS:
                self.owner.fail(WorkRequestError(status, lent.opcode))

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


async def test_an_operation_ends_when_the_device_says_so() -> None:
    rig = Rig()
    task = await rig.under_way()
    assert not task.done()
    assert rig.given_back == 0
    rig.end()
    await task
    assert rig.given_back == 1
    assert rig.owner.breaks == []


async def test_each_is_woken_by_its_own_completion() -> None:
    rig = Rig()
    first, second = await rig.under_way(), await rig.under_way()
    rig.end()
    await settle()
    assert (first.done(), second.done(), rig.given_back) == (True, False, 1)
    rig.end()
    await second
    assert rig.given_back == 2


async def test_one_that_fails_raises_why_the_connection_ended() -> None:
    rig = Rig()
    task = await rig.under_way()
    rig.end(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(WorkRequestError, match="RDMA_WRITE failed: REM_ACCESS_ERR"):
        await task
    assert rig.given_back == 1


async def test_one_that_is_flushed_raises_why_the_connection_ended() -> None:
    rig = Rig()
    first, second = await rig.under_way(), await rig.under_way()
    rig.end(WcStatus.REM_ACCESS_ERR)
    rig.end(WcStatus.WR_FLUSH_ERR)
    for task in (first, second):
        with pytest.raises(WorkRequestError, match="REM_ACCESS_ERR"):
            await task
    assert rig.given_back == 2


async def test_one_that_fails_waits_until_it_is_known_why() -> None:
    rig = Rig()
    rig.owner.reason_known.clear()
    task = await rig.under_way(WcOpcode.RDMA_READ)
    rig.end(WcStatus.WR_FLUSH_ERR)
    await settle()
    assert not task.done()
    assert rig.given_back == 1
    rig.owner.end = PeerClosed("closed there")
    rig.owner.reason_known.set()
    with pytest.raises(PeerClosed):
        await task
    assert not rig.next_is_fenced()


async def test_one_that_succeeds_does_not_wait_for_an_end() -> None:
    rig = Rig()
    rig.owner.reason_known.clear()
    task = await rig.under_way()
    rig.end()
    await task


async def test_one_that_nobody_hears_of_any_more_is_given_up_and_given_back_later() -> None:
    rig = Rig()
    task = await rig.under_way()
    rig.owner.fail(PeerClosed("closed there"))
    rig.queue.stop_waiting()
    with pytest.raises(PeerClosed):
        await task
    assert rig.given_back == 0  # the device may still use it
    rig.queue.abandon()
    assert rig.given_back == 1
    rig.queue.abandon()
    assert rig.given_back == 1


async def test_on_a_connection_that_has_ended_nothing_is_posted() -> None:
    rig = Rig(depth=1)
    rig.owner.closed_here = True
    for _ in range(3):
        with pytest.raises(LocalClosed):
            await rig.perform()
    assert rig.given_back == 3
    assert not rig.qp.posted
    assert rig.queue.try_reserve()  # no place was lost


async def test_a_connection_that_ends_while_one_waits_for_a_place() -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform()
    await settle()
    rig.owner.fail(PeerClosed("closed there"))
    rig.queue.wake_senders()
    with pytest.raises(PeerClosed):
        await task
    assert rig.given_back == 1
    assert len(rig.qp.posted) == 1


async def test_one_that_waits_for_a_place_is_posted_when_there_is_one() -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform()
    await settle()
    assert rig.queue.stats.send_waits == 1
    rig.end()
    await settle()
    rig.end()
    await task
    assert rig.given_back == 1


@pytest.mark.parametrize("opcode", WcOpcode)
async def test_cancelling_while_it_waits_for_a_place_posts_nothing(opcode: WcOpcode) -> None:
    rig = Rig(depth=1)
    rig.send()
    task = rig.perform(opcode)
    await settle()
    await cancel(task)
    assert rig.given_back == 1
    rig.end()
    assert not rig.next_is_fenced()
    assert len(rig.qp.sent) == 2


async def test_a_refused_request_ends_the_connection_and_keeps_what_was_lent() -> None:
    rig = Rig(depth=1)
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send") as caught:
        await rig.perform()
    assert caught.value.errno == errno.EINVAL
    assert len(rig.owner.breaks) == 1
    assert rig.given_back == 0  # the device may have it all the same
    assert rig.queue.try_reserve()
    rig.queue.abandon()
    assert rig.given_back == 1


async def test_the_reason_of_a_refusal_is_the_owners_to_say() -> None:
    rig = Rig()
    rig.owner.end = None
    rig.owner.post_failed = lambda error: PeerClosed("closed there")  # type: ignore[method-assign]
    rig.qp.refuses = True
    with pytest.raises(PeerClosed):
        await rig.perform()


async def test_what_cannot_be_posted_for_another_reason_is_given_back() -> None:
    def post(qp: object, wr_id: int, flags: int) -> None:
        raise ValueError("the memory window is closed")

    rig = Rig(depth=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="closed"):
            await rig.operations.perform(WcOpcode.BIND_MW, post, rig.give_back)
    assert rig.given_back == 3
    assert rig.owner.breaks == []
    assert rig.queue.try_reserve()


@pytest.mark.parametrize("opcode", sorted(READS_AND_ATOMICS))
async def test_after_a_read_that_was_given_up_all_waits_until_it_has_ended(
    opcode: WcOpcode,
) -> None:
    rig = Rig()
    task = await rig.under_way(opcode)
    assert not rig.next_is_fenced()
    await cancel(task)
    assert rig.next_is_fenced()
    assert rig.given_back == 0
    rig.end()
    assert rig.given_back == 1
    assert not rig.next_is_fenced()


@pytest.mark.parametrize("opcode", sorted(set(WcOpcode) - READS_AND_ATOMICS))
async def test_after_others_that_were_given_up_nothing_waits(opcode: WcOpcode) -> None:
    rig = Rig()
    task = await rig.under_way(opcode)
    await cancel(task)
    assert not rig.next_is_fenced()
    rig.end()
    assert rig.given_back == 1


async def test_all_waits_until_the_last_read_that_was_given_up_has_ended() -> None:
    rig = Rig()
    tasks = [await rig.under_way(WcOpcode.RDMA_READ) for _ in range(3)]
    await cancel(tasks[0])
    await cancel(tasks[2])
    rig.end()
    assert rig.next_is_fenced()
    rig.end()
    await tasks[1]
    assert rig.next_is_fenced()
    rig.end()
    assert not rig.next_is_fenced()
    assert rig.given_back == 3


async def test_a_read_that_has_ended_when_it_is_cancelled_is_not_waited_for() -> None:
    rig = Rig()
    task = await rig.under_way(WcOpcode.RDMA_READ)
    rig.end()
    await cancel(task)
    assert not rig.next_is_fenced()
    assert rig.given_back == 1


async def test_a_read_that_was_given_up_comes_back_with_the_queue_pair() -> None:
    rig = Rig()
    await cancel(await rig.under_way(WcOpcode.RDMA_READ))
    rig.queue.abandon()
    assert rig.given_back == 1


async def test_a_completion_that_comes_after_the_waiting_has_stopped() -> None:
    rig = Rig()
    task = await rig.under_way()
    rig.owner.fail(RdmaError("the device forgot it"))
    rig.queue.stop_waiting()
    with pytest.raises(RdmaError, match="forgot"):
        await task
    rig.end()
    rig.queue.abandon()
    assert rig.given_back == 1


class Polling:
    """A BusyPoll that looks, and may find the end, or be cancelled."""

    is_on = True
    nanoseconds = 5_000

    def __init__(self) -> None:
        self.on_look: Callable[[], None] = lambda: None
        self.looks: list[bool] = []
        self.gate: asyncio.Event | None = None

    async def until(self, is_over: Callable[[], bool], nanoseconds: int) -> None:
        assert nanoseconds == self.nanoseconds
        self.on_look()
        self.looks.append(is_over())
        if self.gate is not None:
            await self.gate.wait()


def polling(rig: Rig) -> Polling:
    busy = Polling()
    rig.operations._busy = busy  # type: ignore[assignment]
    return busy


async def test_an_end_that_polling_finds_takes_no_turn_of_the_loop() -> None:
    rig = Rig()
    busy = polling(rig)
    busy.on_look = rig.end
    waiting = rig.operations.perform(WcOpcode.RDMA_READ, rig.post, rig.give_back)
    with pytest.raises(StopIteration):  # it never waits
        waiting.send(None)
    assert busy.looks == [True]
    assert rig.given_back == 1


async def test_a_read_that_is_cancelled_while_it_polls_is_fenced_off() -> None:
    rig = Rig()
    busy = polling(rig)
    busy.gate = asyncio.Event()
    await cancel(await rig.under_way(WcOpcode.RDMA_READ))
    assert busy.looks == [False]
    assert rig.next_is_fenced()
    rig.end()
    assert not rig.next_is_fenced()
