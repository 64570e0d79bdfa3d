"""Transfers: requests on registered memory in one piece, posted and completed in C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import weakref
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.qp import (
    ELSEWHERE,
    HERE,
    FakeCallbacks,
    FakePool,
    FakeRegion,
    call_at_once,
    no_polling,
)
from fakes.wakeups import woken
from simulator.queues import Queues, untyped_ffi

from aiordma import AccessFlags, PeerClosed, RemoteBuffer, VerbsError, WorkRequestError
from aiordma._native import fast_path, ffi
from aiordma.enums import SendFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.loop import run_with_inline_wakeups, running_loop
from aiordma.memory import MemorySlice
from aiordma.messages.remote_access import RemoteAccess
from aiordma.qp import SendQueue
from aiordma.qp.operation import Operation, Operations
from aiordma.qp.post_list import MAX_LENGTH, PostList
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.verbs import DeviceAttributes, QueuePair, QueuePairCaps

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

KEY = 5
FIRST = KEY << 32
SIGNALED, FENCE = int(SendFlags.SIGNALED), int(SendFlags.FENCE)
SEND, WRITE, READ = int(WrOpcode.SEND), int(WrOpcode.RDMA_WRITE), int(WrOpcode.RDMA_READ)
ACCESS = AccessFlags.LOCAL_WRITE
REMOTE = RemoteBuffer(0xABC000, 77, 100)
MAX_MESSAGE = 1000


class Rig:
    """Operations and RemoteAccess on the queue pair of a Queues, which records the requests."""

    def __init__(
        self,
        verbs: Queues,
        *,
        rd_atomic_credits: int = 4,
        depth: int = 16,
        is_iwarp: bool = False,
    ) -> None:
        loop = running_loop()
        self.verbs = verbs
        self.queue = SendQueue(loop, depth, selective=not is_iwarp, max_inline=64)
        self.core = self.queue.core
        cell = untyped_ffi.cast("struct ibv_qp **", verbs.qp_cell)
        self.qp = QueuePair(cell[0], QueuePairCaps(depth, 0))
        self.queue.open(self.qp, FakePool(1), FIRST)  # type: ignore[arg-type]
        self.callbacks = FakeCallbacks()
        self.operations = Operations(loop, self.queue, self.callbacks, no_polling())
        builder = ScatterGatherBuilder(self.queue, 4, call_at_once)
        builder.pd = self.core.pd = HERE
        self.core.max_message_size = MAX_MESSAGE
        attributes = DeviceAttributes(100, 30, 1000, 1 << 30, 16, 16, max_sge_rd=30)
        device: Any = SimpleNamespace(name="fake0", is_iwarp=is_iwarp, attributes=attributes)
        self.remote = RemoteAccess(device, self.operations, builder, 64)
        if rd_atomic_credits:
            self.remote.negotiated(rd_atomic_credits)
        self.python_batches = 0
        self.failed: list[int] = []
        self.dispatcher = fast_path.CompletionDispatcher(self._take_pending)
        self.dispatcher.attach(
            KEY, self.core, fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 32))
        )
        self.queue.post_list = PostList(
            self.qp, self.core, self.dispatcher, self.callbacks.post_failed
        )

    def _take_pending(self) -> None:
        """Handle completions for Python, as MessageDataPath.complete() does."""
        self.python_batches += 1
        batch = ffi.cast("struct ibv_wc *", self.dispatcher.batch)
        for index in range(self.dispatcher.pending):
            wc = batch[index]
            failed = wc.status != WcStatus.SUCCESS
            number = wc.wr_id & fast_path.NUMBER_MASK
            memory = self.queue.completed(number, failed=failed)
            if isinstance(memory, Operation):
                memory.succeeded = not failed
            if failed:
                self.failed.append(number)
                if isinstance(memory, fast_path.Transfer):
                    opcode = WcOpcode.RDMA_READ if memory.is_read else WcOpcode.RDMA_WRITE
                    self.callbacks.fail(WorkRequestError(WcStatus(wc.status), opcode))

    def start(
        self, opcode: int, memory: object, remote: RemoteBuffer | None = REMOTE
    ) -> fast_path.Transfer:
        transfer = self.core.start_transfer(opcode, memory, remote)
        assert transfer is not None
        return transfer

    def perform(
        self, opcode: int, memory: object, remote: RemoteBuffer | None = REMOTE
    ) -> Coroutine[Any, Any, None]:
        return self.operations.finish(self.start(opcode, memory, remote))

    async def performing(self, opcode: int, memory: object) -> asyncio.Task[None]:
        task = asyncio.create_task(self.perform(opcode, memory))
        await asyncio.sleep(0)
        return task

    def poll_completions(self, *numbers: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Complete these requests, and poll for all completions at once."""
        for number in numbers:
            self.verbs.sent(KEY, number, status)
        run_with_inline_wakeups(self.dispatcher.poll, self.verbs.cq)

    async def complete(self, *numbers: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Call poll_completions() on the loop, outside of a task, and let the tasks run."""
        running_loop().call_soon(lambda: self.poll_completions(*numbers, status=status))
        await settle()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the regions whose memory was posted; -1: an inline message."""
        return [post.address >> 16 if post.lkey else -1 for post in self.verbs.posts]

    @property
    def free(self) -> tuple[int, int]:
        """The free send credits, and the free RD/atomic credits."""
        return self.queue.credits, self.core.rd_atomic_credits


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- posting ---


async def test_a_write_is_posted_at_once(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion(70, 3)
    transfer = rig.start(WRITE, region)
    (post,) = verbs.posts
    assert (post.wr_id, post.opcode, post.flags) == (FIRST, WrOpcode.RDMA_WRITE, SIGNALED)
    assert (post.address, post.length, post.lkey, post.num_sge) == (3 << 16, 70, 13, 1)
    assert post.remote == (REMOTE.addr, REMOTE.rkey)
    assert (rig.core.writes, rig.core.bytes_written) == (1, 70)
    assert (region.uses, rig.free, rig.core.transfers_in_flight) == (1, (15, 4), 1)
    assert (transfer.is_over(), transfer.succeeded, transfer.error) == (False, False, 0)
    assert not transfer.is_read


async def test_a_read_fills_the_beginning(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion(200)
    transfer = rig.start(READ, region[50:])
    (post,) = verbs.posts
    assert (post.opcode, post.flags) == (WrOpcode.RDMA_READ, SIGNALED)
    assert (post.address, post.length) == ((1 << 16) + 50, 100)
    assert post.remote == (REMOTE.addr, REMOTE.rkey)
    assert (rig.core.reads, rig.core.bytes_read, rig.free) == (1, 100, (15, 3))
    assert transfer.is_read


async def test_registered_memory_is_sent_as_a_message(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion(MAX_MESSAGE)
    rig.start(SEND, region, None)
    (post,) = verbs.posts
    assert (post.opcode, post.flags) == (WrOpcode.SEND, SIGNALED)
    assert (post.address, post.length, post.lkey) == (1 << 16, MAX_MESSAGE, 11)
    assert (rig.core.messages, rig.core.nbytes) == (1, MAX_MESSAGE)


async def test_reads_are_not_fenced_and_writes_are(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    rig.core.fence_flags = FENCE
    rig.start(WRITE, region)
    rig.start(READ, region)
    assert [post.flags for post in verbs.posts] == [SIGNALED | FENCE, SIGNALED]


async def test_small_messages_before_a_transfer_need_no_signal(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    rig.core.send(b"x")
    rig.start(WRITE, region)
    assert rig.core.unsignaled == 0
    await rig.complete(1)
    assert (rig.free, len(rig.queue)) == ((16, 4), 0)


@pytest.mark.parametrize(
    ("opcode", "memory", "remote"),
    [
        (WRITE, lambda: b"not registered", REMOTE),
        (WRITE, lambda: bytearray(b"not registered"), REMOTE),
        (WRITE, lambda: [FakeRegion()], REMOTE),
        (WRITE, lambda: None, REMOTE),
        (WRITE, lambda: SimpleNamespace(references=1, segment=(1, 2, 3)), REMOTE),
        (WRITE, lambda: FakeRegion(101), REMOTE),
        (WRITE, lambda: FakeRegion()[:0], REMOTE),
        (WRITE, lambda: FakeRegion(pd=ELSEWHERE), REMOTE),
        (WRITE, lambda: FakeRegion((1 << 32) + 10), REMOTE),
        (READ, lambda: FakeRegion(99), REMOTE),
        (READ, lambda: FakeRegion(), RemoteBuffer(1, 2, 0)),
        (READ, lambda: FakeRegion(access=AccessFlags.REMOTE_WRITE), REMOTE),
        (SEND, lambda: FakeRegion(MAX_MESSAGE + 1), None),
    ],
)
async def test_arguments_that_fail_a_check_take_the_slow_path(
    verbs: Queues,
    opcode: int,
    memory: Callable[[], object],
    remote: RemoteBuffer | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow path posts the request, or explains the error."""
    monkeypatch.setattr("fakes.qp.bytearray", lambda _: bytearray(8), raising=False)
    rig, what = Rig(verbs), memory()
    before = rig.free
    assert rig.core.start_transfer(opcode, what, remote) is None
    assert (verbs.posted, rig.free, rig.core.transfers_in_flight) == (0, before, 0)
    if isinstance(what, FakeRegion):
        assert what.uses == 0


async def test_closed_memory_takes_the_slow_path(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    part = region[:80]
    region.close()
    assert rig.core.start_transfer(WRITE, region, REMOTE) is None
    assert rig.core.start_transfer(WRITE, part, REMOTE) is None


async def test_on_iwarp_the_target_of_a_read_needs_remote_write_access(verbs: Queues) -> None:
    rig = Rig(verbs, is_iwarp=True)
    assert rig.core.start_transfer(READ, FakeRegion(), REMOTE) is None
    rig.start(READ, FakeRegion(access=ACCESS | AccessFlags.REMOTE_WRITE))


async def test_without_rd_atomic_credits_reads_take_the_slow_path(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=0)
    assert rig.core.start_transfer(READ, FakeRegion(), REMOTE) is None
    assert rig.core.queued_reads == 0
    rig.start(WRITE, FakeRegion())


@pytest.mark.parametrize(
    "prepare",
    [
        lambda rig: rig.queue.stop(),
        lambda rig: rig.queue.pause(),
        lambda rig: setattr(rig.core, "credits", 0),
        lambda rig: setattr(rig.core, "waiters", 1),
        lambda rig: setattr(rig.core, "has_unposted", True),
        lambda rig: rig.qp.forget(),
        lambda rig: rig.queue.abandon(),
        lambda rig: setattr(rig.core, "make_future", None),
    ],
)
async def test_a_core_that_cannot_post_takes_the_slow_path(
    verbs: Queues, prepare: Callable[[Rig], None]
) -> None:
    rig, region = Rig(verbs), FakeRegion()
    prepare(rig)
    assert rig.core.start_transfer(WRITE, region, REMOTE) is None
    assert (verbs.posted, region.uses) == (0, 0)


@pytest.mark.parametrize("arguments", [(), (WRITE,), (WRITE, None), (WRITE, None, REMOTE, 1)])
async def test_wrong_arguments_raise(verbs: Queues, arguments: tuple[object, ...]) -> None:
    rig = Rig(verbs)
    with pytest.raises(TypeError, match="transfer"):
        rig.core.start_transfer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rig.core.start_transfer("x", FakeRegion(), REMOTE)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        rig.core.start_transfer(WRITE, FakeRegion(), "x")
    with pytest.raises(TypeError):
        fast_path.Transfer()
    assert verbs.posted == 0


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_forked_child_starts_nothing(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    child = os.fork()
    if not child:
        fast_path.note_fork()
        is_none = rig.core.start_transfer(WRITE, region, REMOTE) is None
        os._exit(42 if is_none and not verbs.posted else 1)
    assert exit_code_of(child) == 42


# --- completions ---


async def test_the_waiter_is_woken_by_the_completion(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(WRITE, region)
    assert not task.done()
    await rig.complete(0)
    await task
    assert (region.uses, rig.free, rig.core.transfers_in_flight) == (0, (16, 4), 0)
    assert rig.python_batches == 0  # Python had no completion to handle


async def test_many_transfers_complete_in_a_batch(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=16)
    regions = [FakeRegion(number=number) for number in range(1, 11)]
    tasks = [await rig.performing(READ, region) for region in regions]
    await rig.complete(*range(7))
    assert [task.done() for task in tasks] == [True] * 7 + [False] * 3
    assert [region.uses for region in regions] == [0] * 7 + [1] * 3
    await rig.complete(*range(7, 10))
    await asyncio.gather(*tasks)
    assert rig.free == (16, 16)


async def test_on_iwarp_transfers_complete_in_any_order(verbs: Queues) -> None:
    rig = Rig(verbs, is_iwarp=True)
    regions = [FakeRegion(access=ACCESS | AccessFlags.REMOTE_WRITE) for _ in range(3)]
    tasks = [
        await rig.performing(opcode, region)
        for opcode, region in zip((READ, WRITE, WRITE), regions, strict=True)
    ]
    await rig.complete(2, 1)
    assert [task.done() for task in tasks] == [False, True, True]
    assert [region.uses for region in regions] == [1, 0, 0]
    await rig.complete(0)
    await tasks[0]
    assert regions[0].uses == 0


class Watched(FakeRegion):
    """A region that records when its memory is disposed."""

    def __init__(self, disposed: list[int]) -> None:
        super().__init__()
        self._dispose = lambda registration, over: disposed.append(1)


async def test_a_region_closed_meanwhile_is_disposed_at_the_end(verbs: Queues) -> None:
    disposed: list[int] = []
    rig, region = Rig(verbs), Watched(disposed)
    task = await rig.performing(WRITE, region[10:90])
    region.close()
    assert disposed == []
    await rig.complete(0)
    await task
    assert disposed == [1]


async def test_a_dropped_region_is_kept_until_the_end(verbs: Queues) -> None:
    disposed: list[int] = []
    rig, region = Rig(verbs), Watched(disposed)
    transfer = rig.start(WRITE, region[:80])
    del region
    gc.collect()
    assert disposed == []
    await rig.complete(0)
    assert transfer.is_over()
    assert disposed == [1]


async def test_a_failed_transfer_raises_why_the_connection_ended(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    first = await rig.performing(READ, region)
    second = await rig.performing(WRITE, region)
    await rig.complete(0, status=WcStatus.REM_ACCESS_ERR)
    await rig.complete(1, status=WcStatus.WR_FLUSH_ERR)
    for task in (first, second):
        with pytest.raises(WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
            await task
    assert (rig.failed, region.uses, rig.free) == ([0, 1], 0, (16, 4))


async def test_stop_waiting_wakes_the_waiter_and_keeps_the_memory(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(WRITE, region)
    rig.callbacks.fail(PeerClosed("gone"))
    rig.queue.stop_waiting()
    with pytest.raises(PeerClosed):
        await task
    assert region.uses == 1
    rig.queue.abandon()
    assert (region.uses, rig.core.transfers_in_flight) == (0, 0)


async def test_abandon_ends_all_transfers(verbs: Queues) -> None:
    rig, region = Rig(verbs, rd_atomic_credits=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.callbacks.fail(PeerClosed("gone"))
    rig.queue.abandon()
    for task in tasks:
        with pytest.raises(PeerClosed):
            await task
    assert (region.uses, rig.core.transfers_in_flight, rig.core.queued_reads) == (0, 0, 0)


async def test_a_refused_transfer_ends_the_connection_and_keeps_its_memory(
    verbs: Queues,
) -> None:
    """libsiw keeps the request, so its memory is kept until the queue pair is destroyed."""
    rig, region = Rig(verbs), FakeRegion()
    rig.core.send(b"before")
    verbs.refuse(errno.ENOMEM)
    for opcode in (WRITE, READ, SEND):
        with pytest.raises(VerbsError) as raised:
            await rig.perform(opcode, region)
        assert (raised.value.errno, raised.value.function) == (errno.ENOMEM, "ibv_post_send")
    assert [error.errno for error in rig.callbacks.failures if isinstance(error, VerbsError)] == [
        errno.ENOMEM
    ] * 3
    assert (region.uses, rig.queue.credits) == (3, 15)
    assert (rig.core.writes, rig.core.reads, rig.core.messages) == (0, 0, 1)
    assert (rig.core.next_number, rig.core.unsignaled) == (1, 1)
    verbs.refuse(0)
    task = await rig.performing(WRITE, region)
    await rig.complete(1)
    await task
    assert region.uses == 3
    rig.queue.abandon()
    assert region.uses == 0


async def test_on_a_closed_loop_a_transfer_ends_without_an_error(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    future = running_loop().create_future()

    def closed(_: None) -> None:
        raise RuntimeError("Event loop is closed")

    rig.core.make_future = lambda: SimpleNamespace(done=future.done, set_result=closed)
    transfer = rig.start(WRITE, region)
    rig.poll_completions(0)
    assert (transfer.is_over(), transfer.succeeded, region.uses) == (True, True, 0)


async def test_an_exception_at_the_end_of_a_transfer_does_not_stop_the_others(
    verbs: Queues,
) -> None:
    class CtrlC(BaseException):
        pass

    def interrupted() -> None:
        raise CtrlC

    rig = Rig(verbs)
    regions = [FakeRegion(number=number) for number in range(1, 4)]
    transfers = [rig.start(READ, region) for region in regions]
    message = rig.start(WRITE, regions[0])
    transfers[1].on_abandoned_end = interrupted
    with pytest.raises(CtrlC):
        rig.poll_completions(0, 1, 2, 3)
    assert [transfer.is_over() for transfer in (*transfers, message)] == [True] * 4
    assert [region.uses for region in regions] == [0] * 3
    assert rig.free == (16, 4)


async def test_an_ended_transfer_is_freed(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    transfer = rig.start(WRITE, region)
    future = weakref.ref(transfer.future)
    rig.poll_completions(0)
    del transfer
    gc.collect()
    assert future() is None


async def test_a_dropped_core_is_collected(verbs: Queues) -> None:
    rig, region = Rig(verbs, rd_atomic_credits=1), FakeRegion()
    seen = [weakref.ref(rig.start(READ, region).future) for _ in range(2)]
    del rig
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


# --- cancelling ---


@pytest.mark.parametrize("opcode", [READ, WRITE])
async def test_cancelling_stops_the_waiting_only(verbs: Queues, opcode: int) -> None:
    """After a cancelled read, requests are fenced until it has ended."""
    rig, region = Rig(verbs), FakeRegion()
    await cancel(await rig.performing(opcode, region))
    assert region.uses == 1
    assert rig.core.fence_flags == (FENCE if opcode == READ else 0)
    await rig.complete(0)
    assert (region.uses, rig.core.fence_flags, rig.free) == (0, 0, (16, 4))


async def test_a_read_that_ended_before_it_was_cancelled_leaves_no_fence(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(READ, region)
    verbs.sent(KEY, 0)
    rig.dispatcher.poll(verbs.cq)
    await cancel(task)
    assert (rig.core.fence_flags, region.uses) == (0, 0)


# --- RD/atomic credits ---


async def test_reads_beyond_the_rd_atomic_credits_are_queued(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=2)
    regions = [FakeRegion(number=number) for number in range(1, 8)]
    tasks = [await rig.performing(READ, region) for region in regions]
    assert (rig.numbers, rig.core.queued_reads, rig.free) == ([1, 2], 5, (14, 0))
    assert [region.uses for region in regions] == [1] * 7
    await rig.complete(0)
    assert rig.numbers == [1, 2, 3]
    calls = verbs.calls
    await rig.complete(1, 2)
    assert rig.numbers == [1, 2, 3, 4, 5]
    assert verbs.calls == calls + 1
    assert {post.flags for post in verbs.posts} == {SIGNALED}
    await rig.complete(3, 4)
    await rig.complete(5, 6)
    await asyncio.gather(*tasks)
    assert (rig.core.reads, rig.free, rig.python_batches) == (7, (16, 2), 0)


async def test_writes_and_sends_do_not_wait_for_queued_reads(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=1)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    rig.start(WRITE, FakeRegion(number=3))
    assert rig.core.send(b"x") == 0
    assert rig.numbers == [1, 3, -1]


async def test_a_read_without_a_send_credit_takes_the_slow_path(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=40, depth=4)
    regions = [FakeRegion(number=number) for number in range(1, 5)]
    for region in regions:
        rig.start(READ, region)
    assert rig.core.start_transfer(READ, regions[0], REMOTE) is None
    assert rig.free == (0, 36)


async def test_many_queued_reads_are_posted_in_several_calls(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=40, depth=64)
    rig.core.rd_atomic_credits = 0
    for number in range(1, 41):
        rig.start(READ, FakeRegion(number=number))
    assert (verbs.calls, rig.core.queued_reads) == (0, 40)
    rig.core.rd_atomic_credits = 40
    rig.core.grant_rd_atomic_credits()
    assert (verbs.calls, rig.core.queued_reads) == (3, 0)
    assert rig.numbers == list(range(1, 41))
    assert rig.free == (24, 0)


async def test_a_queued_read_waits_for_a_send_credit_too(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=1, depth=4)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    held, rig.core.credits = rig.core.credits, 0
    rig.core.oldest_pending = 1  # as if its send credit were in use again
    rig.core.rd_atomic_credits += 1
    rig.core.grant_rd_atomic_credits()
    assert rig.numbers == [1]
    rig.core.credits = held
    rig.core.grant_rd_atomic_credits()
    assert rig.numbers == [1, 2]


async def test_a_cancelled_queued_read_is_never_posted(verbs: Queues) -> None:
    rig, regions = (
        Rig(verbs, rd_atomic_credits=1),
        [FakeRegion(number=number) for number in range(1, 4)],
    )
    tasks = [await rig.performing(READ, region) for region in regions]
    await cancel(tasks[1])
    assert (regions[1].uses, rig.core.queued_reads, rig.core.fence_flags) == (0, 1, 0)
    await rig.complete(0)
    assert rig.numbers == [1, 3]
    await rig.complete(1)
    await tasks[2]
    assert rig.free == (16, 1)


async def test_queued_reads_end_with_the_connection(verbs: Queues) -> None:
    rig, region = Rig(verbs, rd_atomic_credits=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.callbacks.fail(PeerClosed("gone"))
    rig.queue.stop()
    rig.remote.stop()
    for task in tasks[1:]:
        with pytest.raises(PeerClosed):
            await task
    assert (region.uses, verbs.posted) == (1, 1)


async def test_a_queued_read_that_is_dropped_and_then_cancelled(verbs: Queues) -> None:
    rig, region = Rig(verbs, rd_atomic_credits=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.callbacks.fail(PeerClosed("gone"))
    rig.queue.stop()
    await cancel(tasks[1])
    assert (rig.core.queued_reads, rig.core.transfers_in_flight, region.uses) == (0, 1, 1)
    with pytest.raises(PeerClosed):
        await tasks[2]


async def test_a_read_cancelled_as_it_is_refused_ends_the_connection(
    verbs: Queues,
) -> None:
    rig, region = Rig(verbs, rd_atomic_credits=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(2)]
    verbs.refuse(errno.ENOMEM)
    verbs.sent(KEY, 0)
    rig.dispatcher.poll(verbs.cq)
    await cancel(tasks[1])
    await tasks[0]
    assert len(rig.callbacks.failures) == 1


async def test_a_queued_read_gets_an_unused_send_credit(verbs: Queues) -> None:
    """The credit is released without a completion, and no request is in flight."""
    rig = Rig(verbs, rd_atomic_credits=1, depth=2)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    assert rig.queue.try_reserve()
    rig.core.credits = -1  # as if the credit of the read were in use again: possible on iWARP
    rig.poll_completions(0)
    assert (rig.numbers, rig.free, rig.core.queued_reads) == ([1], (0, 1), 1)
    rig.queue.unreserve()
    assert (rig.numbers, rig.free, rig.core.queued_reads) == ([1, 2], (0, 0), 0)


async def test_queued_reads_are_counted_as_waits(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=1)
    for _ in range(3):
        rig.start(READ, FakeRegion())
    assert rig.core.rd_atomic_waits == 2


async def test_numbers_can_be_numpy_integers(verbs: Queues) -> None:
    class Number:
        def __index__(self) -> int:
            return 5

    rig = Rig(verbs)
    remote: Any = SimpleNamespace(addr=Number(), rkey=Number(), length=200)
    rig.start(WRITE, FakeRegion(), remote)
    assert verbs.posts[0].remote == (5, 5)


async def test_refused_queued_reads_wake_their_waiters(verbs: Queues) -> None:
    """The memory of all of them is kept until the queue pair is destroyed."""
    rig, region = Rig(verbs, rd_atomic_credits=2), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(5)]
    verbs.refuse(errno.ENOMEM)
    await rig.complete(0, 1)
    for task in tasks[2:4]:
        with pytest.raises(VerbsError) as raised:
            await task
        assert raised.value.errno == errno.ENOMEM
    assert (region.uses, rig.core.queued_reads) == (3, 1)
    rig.queue.abandon()
    assert region.uses == 0
    with pytest.raises(VerbsError):
        await tasks[4]


async def test_queued_reads_and_waiting_tasks_get_credits_alternately(verbs: Queues) -> None:
    """Reads queued in C and tasks that wait in Python each get every second credit."""
    rig = Rig(verbs, rd_atomic_credits=1)
    pieces = [FakeRegion(70, 10), FakeRegion(70, 12)]
    tasks = [await rig.performing(READ, FakeRegion(number=number)) for number in (1, 2)]
    tasks += [asyncio.create_task(rig.remote.read(REMOTE, pieces)) for _ in range(3)]
    await settle()
    tasks += [await rig.performing(READ, FakeRegion(number=number)) for number in (3, 4)]
    for number in range(7):
        assert len(verbs.posts) == number + 1
        await rig.complete(number)
    await asyncio.gather(*tasks)
    assert sorted(rig.numbers) == [1, 2, 3, 4, 10, 10, 10]
    assert rig.numbers[:3] in ([1, 10, 2], [1, 2, 10])
    assert rig.numbers[2:6] in ([2, 10, 3, 10], [10, 3, 10, 4])
    assert rig.free == (16, 1)


async def test_an_unused_rd_atomic_credit_goes_to_a_queued_read(verbs: Queues) -> None:
    rig = Rig(verbs, rd_atomic_credits=1)
    assert rig.remote._rd_atomic_credits.try_acquire()
    rig.start(READ, FakeRegion())
    assert verbs.posted == 0
    rig.remote._rd_atomic_credits.release()
    assert (verbs.posted, rig.free) == (1, (15, 0))


# --- batching ---


async def write_slow_path(rig: Rig, region: FakeRegion) -> None:
    """Write as Connection.write() does on the slow path."""
    await rig.remote.write(region, REMOTE, -1)


async def write(rig: Rig, region: FakeRegion) -> None:
    """Write as Connection.write() does."""
    transfer = rig.core.start_transfer(WRITE, region, REMOTE)
    if transfer is None:
        await write_slow_path(rig, region)
    else:
        await rig.operations.finish(transfer)


async def test_transfers_of_tasks_woken_together_are_posted_in_one_call(verbs: Queues) -> None:
    """The requests of both paths keep their order. The first one makes the chain."""
    rig = Rig(verbs)
    regions = [FakeRegion(number=number) for number in range(1, 7)]
    tasks = await woken(
        lambda: write_slow_path(rig, regions[0]),
        lambda: rig.perform(WRITE, regions[1]),
        lambda: rig.perform(READ, regions[2]),
        lambda: write_slow_path(rig, regions[3]),
        lambda: rig.perform(SEND, regions[4], None),
        lambda: rig.perform(WRITE, regions[5]),
    )
    assert (verbs.calls, rig.numbers) == (1, [1, 2, 3, 4, 5, 6])
    assert [post.wr_id - FIRST for post in verbs.posts] == list(range(6))
    assert (rig.dispatcher.open_post_lists, rig.core.batching, rig.core.has_unposted) == (
        0,
        False,
        False,
    )
    await rig.complete(*range(6))
    await asyncio.gather(*tasks)
    assert rig.free == (16, 4)


async def test_a_small_message_does_not_overtake_batched_transfers(verbs: Queues) -> None:
    rig = Rig(verbs)
    regions = [FakeRegion(number=number) for number in range(1, 4)]

    def send() -> None:
        assert rig.core.send(b"small") == -1
        assert rig.queue.try_reserve()
        rig.queue.post_inline(b"small")

    await woken(
        lambda: write_slow_path(rig, regions[0]),
        lambda: rig.perform(WRITE, regions[1]),
        send,
        lambda: rig.perform(WRITE, regions[2]),
    )
    assert rig.numbers == [1, 2, -1, 3]


async def test_a_full_chain_is_posted_before_the_next(verbs: Queues) -> None:
    rig = Rig(verbs, depth=4 * MAX_LENGTH)
    region = FakeRegion()

    await woken(*[lambda: write(rig, region)] * (2 * MAX_LENGTH + 1))
    assert verbs.calls == 3
    assert [post.wr_id - FIRST for post in verbs.posts] == list(range(2 * MAX_LENGTH + 1))


async def test_a_refused_chain_wakes_its_waiters_and_no_earlier_one(verbs: Queues) -> None:
    rig = Rig(verbs)
    region = FakeRegion()
    earlier = await rig.performing(WRITE, region)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(1)
    tasks = await woken(
        lambda: write_slow_path(rig, region),
        lambda: rig.perform(WRITE, region),
        lambda: rig.perform(READ, region),
    )
    for task in tasks:
        with pytest.raises(VerbsError):
            await task
    assert (len(rig.callbacks.failures), region.uses, earlier.done()) == (1, 4, False)
    assert rig.core.start_transfer(WRITE, region, REMOTE) is None  # nothing is posted after it
    await rig.complete(0)
    await earlier
    rig.queue.abandon()
    assert region.uses == 0


async def test_a_refused_full_chain_wakes_its_waiters(verbs: Queues) -> None:
    rig = Rig(verbs, depth=4 * MAX_LENGTH)
    region = FakeRegion()
    await woken(lambda: write_slow_path(rig, region), lambda: write_slow_path(rig, region))

    verbs.refuse(errno.ENOMEM)
    for task in await woken(*[lambda: write(rig, region)] * (MAX_LENGTH + 1)):
        with pytest.raises(VerbsError):
            await task


async def test_a_read_queued_while_batching_is_posted_after_the_batch(
    verbs: Queues,
) -> None:
    rig = Rig(verbs, rd_atomic_credits=1)
    regions = [FakeRegion(number=number) for number in range(1, 4)]
    assert rig.remote._rd_atomic_credits.try_acquire()
    await woken(
        lambda: write_slow_path(rig, regions[0]),
        lambda: rig.perform(READ, regions[1]),
        rig.remote._rd_atomic_credits.release,
        lambda: rig.perform(WRITE, regions[2]),
    )
    assert rig.numbers == [1, 3, 2]


# --- polling ---


async def test_poll_for_completes_a_transfer(verbs: Queues) -> None:
    rig, region = Rig(verbs), FakeRegion()
    transfer = rig.start(WRITE, region)
    verbs.sent(KEY, 0)
    assert rig.dispatcher.poll_for(verbs.cq, 10**9) == 1
    assert transfer.is_over()
    assert rig.dispatcher.notified_at > 0
    with contextlib.suppress(asyncio.CancelledError):
        await transfer.future


# --- ReferenceCount ---


async def test_a_reference_count_counts_uses() -> None:
    references, ended = fast_path.ReferenceCount(HERE, int(ACCESS)), list[int]()
    assert (references.pd, references.access, references.count, references.closed) == (
        HERE,
        ACCESS,
        0,
        False,
    )
    references.acquire(HERE)
    references.acquire(HERE)
    with pytest.raises(ValueError, match="another device"):
        references.acquire(ELSEWHERE)
    references.close(lambda: ended.append(references.count))
    with pytest.raises(ValueError, match="closed"):
        references.acquire(HERE)
    references.release()
    assert (references.count, references.closed, ended) == (1, True, [])
    references.release()
    assert ended == [0]


async def test_an_unused_reference_count_calls_on_unused_at_once() -> None:
    references, ended = fast_path.ReferenceCount(HERE, 0), list[int]()
    references.close(lambda: ended.append(1))
    assert ended == [1]


async def test_a_slice_shares_the_reference_count_of_its_region() -> None:
    region = FakeRegion()
    part: MemorySlice = region[10:30][5:]
    assert part.references is region.references
    assert part.segment == ((1 << 16) + 15, 15, 11)
    assert part.addr == (1 << 16) + 15
