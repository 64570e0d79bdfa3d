"""Sender: messages that are copied, and messages of registered memory."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest
from fakes.qp import (
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
        self.callbacks = FakeCallbacks()
        operations = Operations(loop, self.queue, self.callbacks, no_polling())
        builder = ScatterGatherBuilder(self.queue, 4, self.call)
        builder.pd = HERE
        self.sender = Sender(operations, builder, OPTIONS)

    async def call(self, function: Callable[[], None]) -> None:
        function()

    async def copy(self, data: bytes, imm: int = NO_IMMEDIATE) -> None:
        await self.sender.send_copy(data, len(data), imm)

    def send_registered(
        self, data: Any, imm: int = NO_IMMEDIATE, invalidate: RemoteBuffer | None = None
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self.sender.send_registered(data, imm, invalidate))

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        completed = self.queue.completed(self.qp.posted.popleft())
        if isinstance(completed, Operation):
            completed.succeeded = status is WcStatus.SUCCESS
            if status is not WcStatus.SUCCESS:
                self.callbacks.fail(WorkRequestError(status, completed.opcode))

    @property
    def sent(self) -> tuple[int, int]:
        return self.queue.stats.messages_sent, self.queue.stats.bytes_sent


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- copies ---


@pytest.mark.parametrize(("nbytes", "is_inline"), [(0, True), (16, True), (17, False)])
async def test_small_messages_are_sent_inline(nbytes: int, is_inline: bool) -> None:
    rig = Rig()
    await rig.copy(bytes(nbytes), 7)
    assert rig.qp.sent == [(bytes(nbytes), 7)]
    assert rig.pool.is_whole is is_inline
    assert rig.signaled == [not is_inline]
    assert rig.sent == (1, nbytes)
    rig.end()
    assert len(rig.pool.free) == 1


async def test_a_message_of_the_largest_size_is_sent_and_a_larger_one_is_refused() -> None:
    rig = Rig()
    await rig.copy(bytes(1000))
    with pytest.raises(ValueError, match="a message of 1001 bytes; max_message_size is 1000"):
        await rig.copy(bytes(1001))
    assert rig.sent == (1, 1000)


async def test_a_buffer_for_an_empty_pool_is_made_by_the_given_worker_call() -> None:
    rig = Rig(free_buffers=0)
    await rig.copy(bytes(100))
    assert rig.pool.requested == [(100, rig.call)]
    rig.end()
    assert rig.pool.is_whole


async def test_senders_that_wait_for_a_credit_are_counted_and_served_in_order() -> None:
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


async def test_a_send_that_waits_for_a_credit_raises_the_end_of_the_connection() -> None:
    rig = Rig(depth=1)
    await rig.copy(b"one")
    task = asyncio.create_task(rig.copy(b"two"))
    await settle()
    rig.callbacks.fail(PeerClosed("closed there"))
    rig.queue.wake_senders()
    with pytest.raises(PeerClosed):
        await task
    assert rig.sent == (1, 3)


@pytest.mark.parametrize("nbytes", [1, 100])
async def test_send_copy_on_an_ended_connection_sends_nothing(nbytes: int) -> None:
    rig = Rig(depth=1)
    rig.callbacks.closed_here = True
    for _ in range(3):
        with pytest.raises(LocalClosed):
            await rig.copy(bytes(nbytes))
    assert (rig.sent, rig.pool.is_whole, rig.queue.try_reserve()) == ((0, 0), True, True)


@pytest.mark.parametrize("nbytes", [1, 100])
async def test_a_refused_copy_is_not_counted_and_returns_its_credit(nbytes: int) -> None:
    rig = Rig(depth=1)
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send"):
        await rig.copy(bytes(nbytes))
    assert rig.sent == (0, 0)
    assert len(rig.callbacks.failures) == 1
    assert rig.queue.try_reserve()
    # The device can still read the buffer of a request that it refused.
    assert len(rig.pool.free) == (1 if nbytes == 1 else 0)
    rig.queue.abandon()
    assert rig.pool.is_whole


async def test_a_send_that_registers_a_buffer_raises_the_end_of_the_connection() -> None:
    rig = Rig(free_buffers=0, depth=1)

    async def call(function: Callable[[], None]) -> None:
        function()
        rig.callbacks.fail(PeerClosed("closed there"))

    rig.sender._builder.call_in_worker = call
    with pytest.raises(PeerClosed):
        await rig.copy(bytes(100))
    assert rig.pool.is_whole
    assert rig.queue.try_reserve()


async def test_cancelling_a_send_that_registers_a_buffer_sends_nothing() -> None:
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


async def test_a_failed_registration_is_raised_and_returns_the_credit() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig = Rig(free_buffers=0, depth=1)
    rig.sender._builder.call_in_worker = fail
    for _ in range(3):
        with pytest.raises(VerbsError):
            await rig.copy(bytes(100))
    assert rig.queue.try_reserve()


# --- registered memory ---


@pytest.mark.parametrize(
    ("imm", "invalidate", "opcode", "remote"),
    [
        (NO_IMMEDIATE, None, WrOpcode.SEND, (0, 0)),
        (0, None, WrOpcode.SEND_WITH_IMM, (0, 0)),
        (7, None, WrOpcode.SEND_WITH_IMM, (0, 0)),
        (NO_IMMEDIATE, RemoteBuffer(0x5000, 77, 9), WrOpcode.SEND_WITH_INV, (0, 77)),
    ],
)
async def test_registered_memory_is_sent_in_place(
    imm: int, invalidate: RemoteBuffer | None, opcode: WrOpcode, remote: tuple[int, int]
) -> None:
    rig, region = Rig(), FakeRegion(50)
    task = rig.send_registered([region, region[:5], b"copy"], imm, invalidate)
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
        await rig.send_registered(region)
    with pytest.raises(ValueError, match="1001 bytes"):
        await rig.send_registered([region[:1000], b"x"])
    assert (region.uses, rig.sent) == (0, (0, 0))
    assert BUFFER_SIZE >= 1000


async def test_memory_of_another_protection_domain_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.send_registered(FakeRegion(pd=ELSEWHERE))
    assert rig.qp.requests == []


async def test_a_failed_send_of_registered_memory_raises_and_releases_it() -> None:
    rig, region = Rig(), FakeRegion()
    task = rig.send_registered(region)
    await settle()
    rig.end(WcStatus.RETRY_EXC_ERR)
    with pytest.raises(WorkRequestError, match="SEND failed: RETRY_EXC_ERR"):
        await task
    assert region.uses == 0


async def test_cancelling_keeps_posted_memory_acquired_until_its_completion() -> None:
    rig, region = Rig(), FakeRegion()
    task = rig.send_registered(region)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert region.uses == 1
    rig.end()
    assert region.uses == 0


async def test_a_refused_send_of_registered_memory_keeps_it_until_abandon() -> None:
    rig, region = Rig(), FakeRegion()
    rig.qp.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_send"):
        await rig.send_registered(region)
    assert (region.uses, rig.sent) == (1, (0, 0))
    rig.queue.abandon()
    assert region.uses == 0


async def test_send_registered_on_an_ended_connection_acquires_no_memory() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.callbacks.closed_here = True
    with pytest.raises(LocalClosed):
        await rig.send_registered([region, b"copy"])
    assert region.uses == 0
    assert rig.pool.requested == []


# --- post_now ---


async def test_post_now_is_the_send_of_the_core() -> None:
    rig = Rig()
    assert rig.sender.post_now == rig.queue.core.send
    assert rig.sender.post_now(b"x") == -1  # C cannot use the fake queue pair: the slow path


async def test_post_now_posts_nothing_on_a_loop_with_checkpoints() -> None:
    class CheckpointLoop:
        async def checkpoint(self) -> None:
            """Pass a checkpoint without yielding."""

        def create_future(self) -> object:
            raise AssertionError("no task waits")

    rig = Rig()
    loop: Any = CheckpointLoop()
    operations = Operations(loop, rig.queue, rig.callbacks, no_polling())
    sender = Sender(operations, ScatterGatherBuilder(rig.queue, 4, rig.call), OPTIONS)
    assert sender.post_now is not rig.queue.core.send
    assert sender.post_now(b"x") == -1


async def test_an_errno_of_post_now_ends_the_connection() -> None:
    rig = Rig()
    error = rig.sender.post_error(errno.EINVAL)
    assert isinstance(error, VerbsError)
    assert (error.errno, "ibv_post_send" in str(error)) == (errno.EINVAL, True)
    assert rig.callbacks.failures == [rig.callbacks.end]
