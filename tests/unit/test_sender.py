"""Sender: messages that are copied, and messages that are lent."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest
from qp_fakes import (
    BUFFER_SIZE,
    ELSEWHERE,
    HERE,
    FakeCallbacks,
    FakeRegion,
    SendRig,
    no_polling,
)

from aiordma import (
    ConnectionOptions,
    LocalClosed,
    PeerClosed,
    RemoteBuffer,
    VerbsError,
    WorkRequestError,
)
from aiordma.enums import WcStatus, WrOpcode
from aiordma.loop import running_loop
from aiordma.messages.sender import Sender
from aiordma.qp import Operation
from aiordma.qp.operation import Operations
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.verbs.queue_pair import NO_IMMEDIATE

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

OPTIONS = ConnectionOptions(max_inline=16, max_message_size=1000)


class Rig(SendRig):
    def __init__(self, free_buffers: int = 1, *, depth: int = 16) -> None:
        super().__init__(free_buffers, depth=depth)
        loop = running_loop()
        self.owner = FakeCallbacks()
        operations = Operations(loop, self.queue, self.owner, no_polling())
        gatherer = ScatterGatherBuilder(self.queue, 4, self.call)
        gatherer.pd = HERE
        self.sender = Sender(operations, gatherer, OPTIONS)

    async def call(self, function: Callable[[], None]) -> None:
        function()

    async def copy(self, data: bytes, imm: int = NO_IMMEDIATE) -> None:
        await self.sender.send_copy(data, len(data), imm)

    def lend(
        self, data: Any, imm: int = NO_IMMEDIATE, invalidate: RemoteBuffer | None = None
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self.sender.send_registered(data, imm, invalidate))

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        lent = self.queue.completed(self.qp.posted.popleft())
        if isinstance(lent, Operation):
            lent.succeeded = status is WcStatus.SUCCESS
            if status is not WcStatus.SUCCESS:
                self.owner.fail(WorkRequestError(status, lent.opcode))

    @property
    def sent(self) -> tuple[int, int]:
        return self.queue.stats.messages_sent, self.queue.stats.bytes_sent


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- copies ---


@pytest.mark.parametrize(("nbytes", "is_inline"), [(0, True), (16, True), (17, False)])
async def test_short_messages_travel_in_the_request(nbytes: int, is_inline: bool) -> None:
    rig = Rig()
    await rig.copy(bytes(nbytes), 7)
    assert rig.qp.sent == [(bytes(nbytes), 7)]
    assert rig.pool.is_whole is is_inline
    assert rig.signaled == [not is_inline]
    assert rig.sent == (1, nbytes)
    rig.end()
    assert len(rig.pool.home) == 1


async def test_a_message_as_large_as_can_be_is_sent_and_no_larger_one() -> None:
    rig = Rig()
    await rig.copy(bytes(1000))
    with pytest.raises(ValueError, match="a message of 1001 bytes; max_message_size is 1000"):
        await rig.copy(bytes(1001))
    assert rig.sent == (1, 1000)


async def test_a_buffer_that_is_not_there_is_made_in_the_ids_own_way() -> None:
    rig = Rig(free_buffers=0)
    await rig.copy(bytes(100))
    assert rig.pool.asked == [(100, rig.call)]
    rig.end()
    assert rig.pool.is_whole


async def test_senders_wait_for_a_place_and_are_counted() -> None:
    rig = Rig(depth=1)
    await rig.copy(b"one")
    tasks = [asyncio.create_task(rig.copy(b"%d" % number)) for number in range(3)]
    await settle()
    assert rig.queue.stats.send_waits == 3
    assert rig.sent == (1, 3)  # only what is posted counts
    for _ in range(3):
        rig.end()
        await settle()
    await asyncio.gather(*tasks)
    assert [data for data, _ in rig.qp.sent] == [b"one", b"0", b"1", b"2"]


async def test_a_connection_that_ends_while_one_waits_for_a_place() -> None:
    rig = Rig(depth=1)
    await rig.copy(b"one")
    task = asyncio.create_task(rig.copy(b"two"))
    await settle()
    rig.owner.fail(PeerClosed("closed there"))
    rig.queue.wake_senders()
    with pytest.raises(PeerClosed):
        await task
    assert rig.sent == (1, 3)


@pytest.mark.parametrize("nbytes", [1, 100])
async def test_on_a_connection_that_has_ended_nothing_is_sent(nbytes: int) -> None:
    rig = Rig(depth=1)
    rig.owner.closed_here = True
    for _ in range(3):
        with pytest.raises(LocalClosed):
            await rig.copy(bytes(nbytes))
    assert (rig.sent, rig.pool.is_whole, rig.queue.try_reserve()) == ((0, 0), True, True)


@pytest.mark.parametrize("nbytes", [1, 100])
async def test_a_refused_message_is_not_counted_and_loses_no_place(nbytes: int) -> None:
    rig = Rig(depth=1)
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send"):
        await rig.copy(bytes(nbytes))
    assert rig.sent == (0, 0)
    assert len(rig.owner.breaks) == 1
    assert rig.queue.try_reserve()
    # The device may still read the buffer of one that it refused.
    assert len(rig.pool.home) == (1 if nbytes == 1 else 0)
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_connection_that_ends_while_memory_is_registered() -> None:
    rig = Rig(free_buffers=0, depth=1)

    async def call(function: Callable[[], None]) -> None:
        function()
        rig.owner.fail(PeerClosed("closed there"))

    rig.sender._builder.call_in_worker = call
    with pytest.raises(PeerClosed):
        await rig.copy(bytes(100))
    assert rig.pool.is_whole
    assert rig.queue.try_reserve()


async def test_cancelling_while_memory_is_registered_sends_nothing() -> None:
    async def never(function: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    rig = Rig(free_buffers=0, depth=1)
    rig.sender._builder.call_in_worker = never
    task = asyncio.create_task(rig.copy(bytes(100)))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.queue.try_reserve()
    assert rig.qp.sent == []


async def test_memory_that_cannot_be_registered_is_told_as_it_is() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig = Rig(free_buffers=0, depth=1)
    rig.sender._builder.call_in_worker = fail
    for _ in range(3):
        with pytest.raises(VerbsError):
            await rig.copy(bytes(100))
    assert rig.queue.try_reserve()


# --- lent ---


@pytest.mark.parametrize(
    ("imm", "invalidate", "opcode", "remote"),
    [
        (NO_IMMEDIATE, None, WrOpcode.SEND, (0, 0)),
        (0, None, WrOpcode.SEND_WITH_IMM, (0, 0)),
        (7, None, WrOpcode.SEND_WITH_IMM, (0, 0)),
        (NO_IMMEDIATE, RemoteBuffer(0x5000, 77, 9), WrOpcode.SEND_WITH_INV, (0, 77)),
    ],
)
async def test_registered_memory_is_sent_as_it_is(
    imm: int, invalidate: RemoteBuffer | None, opcode: WrOpcode, remote: tuple[int, int]
) -> None:
    rig, region = Rig(), FakeRegion(50)
    task = rig.lend([region, region[:5], b"copy"], imm, invalidate)
    await settle()
    segments = [(0x10000, 50, 11), (0x10000, 5, 11), (0x1000, 4, 99)]
    assert rig.qp.requests == [(opcode, segments, remote, imm)]
    assert rig.signaled == [True]
    assert (region.uses, rig.sent) == (2, (1, 59))
    assert not task.done()
    rig.end()
    await task
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_registered_memory_that_is_too_large_is_refused() -> None:
    rig, region = Rig(), FakeRegion(1001)
    with pytest.raises(ValueError, match="1001 bytes do not fit into a max_message_size of 1000"):
        await rig.lend(region)
    with pytest.raises(ValueError, match="1001 bytes"):
        await rig.lend([region[:1000], b"x"])
    assert (region.uses, rig.sent) == (0, (0, 0))
    assert BUFFER_SIZE >= 1000


async def test_memory_of_elsewhere_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.lend(FakeRegion(pd=ELSEWHERE))
    assert rig.qp.requests == []


async def test_a_lent_message_that_fails_raises_why_and_is_given_back() -> None:
    rig, region = Rig(), FakeRegion()
    task = rig.lend(region)
    await settle()
    rig.end(WcStatus.RETRY_EXC_ERR)
    with pytest.raises(WorkRequestError, match="SEND failed: RETRY_EXC_ERR"):
        await task
    assert region.uses == 0


async def test_cancelling_does_not_take_back_what_was_lent() -> None:
    rig, region = Rig(), FakeRegion()
    task = rig.lend(region)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert region.uses == 1
    rig.end()
    assert region.uses == 0


async def test_a_refused_message_is_not_counted_and_stays_lent() -> None:
    rig, region = Rig(), FakeRegion()
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send"):
        await rig.lend(region)
    assert (region.uses, rig.sent) == (1, (0, 0))
    rig.queue.abandon()
    assert region.uses == 0


async def test_on_a_connection_that_has_ended_nothing_is_lent() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.owner.closed_here = True
    with pytest.raises(LocalClosed):
        await rig.lend([region, b"copy"])
    assert region.uses == 0
    assert rig.pool.asked == []


# --- without further ado ---


async def test_what_is_posted_at_once_goes_by_the_lane() -> None:
    rig = Rig()
    assert rig.sender.post_now == rig.queue.core.send
    assert rig.sender.post_now(b"x") == -1  # on fakes: the long way


async def test_where_a_checkpoint_is_owed_nothing_is_posted_at_once() -> None:
    class Owing:
        async def checkpoint(self) -> None:
            """Nobody waits."""

        def create_future(self) -> object:
            raise AssertionError("nobody waits")

    rig = Rig()
    loop: Any = Owing()
    operations = Operations(loop, rig.queue, rig.owner, no_polling())
    sender = Sender(operations, ScatterGatherBuilder(rig.queue, 4, rig.call), OPTIONS)
    assert sender.post_now is not rig.queue.core.send
    assert sender.post_now(b"x") == -1


async def test_an_errno_of_what_is_posted_at_once_ends_the_connection() -> None:
    rig = Rig()
    error = rig.sender.post_error(errno.EINVAL)
    assert isinstance(error, VerbsError)
    assert (error.errno, "ibv_post_send" in str(error)) == (errno.EINVAL, True)
    assert rig.owner.breaks == [rig.owner.end]
