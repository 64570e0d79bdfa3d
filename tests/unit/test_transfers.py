"""Transfers: requests on registered memory in one piece, which C posts and sees end."""

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
from qp_fakes import (
    ELSEWHERE,
    HERE,
    FakeCallbacks,
    FakePool,
    FakeRegion,
    call_at_once,
    no_polling,
)
from verbs_fakes import FakeVerbs, untyped_ffi
from wakeups import woken

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
    """All that posts requests, on a queue pair in C that notes what is posted."""

    def __init__(
        self, verbs: FakeVerbs, *, turns: int = 4, depth: int = 16, is_iwarp: bool = False
    ) -> None:
        loop = running_loop()
        self.verbs = verbs
        self.queue = SendQueue(loop, depth, selective=not is_iwarp, max_inline=64)
        self.lane = self.queue.core
        cell = untyped_ffi.cast("struct ibv_qp **", verbs.qp_cell)
        self.qp = QueuePair(cell[0], QueuePairCaps(depth, 0))
        self.queue.open(self.qp, FakePool(1), FIRST)  # type: ignore[arg-type]
        self.owner = FakeCallbacks()
        self.operations = Operations(loop, self.queue, self.owner, no_polling())
        gatherer = ScatterGatherBuilder(self.queue, 4, call_at_once)
        gatherer.pd = self.lane.pd = HERE
        self.lane.max_message_size = MAX_MESSAGE
        attributes = DeviceAttributes(100, 30, 1000, 1 << 30, 16, 16, max_sge_rd=30)
        device: Any = SimpleNamespace(name="fake0", is_iwarp=is_iwarp, attributes=attributes)
        self.remote = RemoteAccess(device, self.operations, gatherer, 64)
        if turns:
            self.remote.negotiated(turns)
        self.delivered = 0
        self.failed: list[int] = []
        self.completions = fast_path.CompletionDispatcher(self._deliver)
        self.completions.attach(
            KEY, self.lane, fast_path.ReceiveQueue(fast_path.ReceiveRingCore(4, 32))
        )
        self.queue.post_list = PostList(
            self.qp, self.lane, self.completions, self.owner.post_failed
        )

    def _deliver(self) -> None:
        """As Traffic takes what is left."""
        self.delivered += 1
        batch = ffi.cast("struct ibv_wc *", self.completions.batch)
        for index in range(self.completions.pending):
            wc = batch[index]
            failed = wc.status != WcStatus.SUCCESS
            number = wc.wr_id & fast_path.NUMBER_MASK
            lent = self.queue.completed(number, failed=failed)
            if isinstance(lent, Operation):
                lent.succeeded = not failed
            if failed:
                self.failed.append(number)
                if isinstance(lent, fast_path.Transfer):
                    opcode = WcOpcode.RDMA_READ if lent.is_read else WcOpcode.RDMA_WRITE
                    self.owner.fail(WorkRequestError(WcStatus(wc.status), opcode))

    def start(
        self, opcode: int, memory: object, remote: RemoteBuffer | None = REMOTE
    ) -> fast_path.Transfer:
        transfer = self.lane.start_transfer(opcode, memory, remote)
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

    def end(self, *numbers: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """The device has ended these, and the loop hears of them together."""
        for number in numbers:
            self.verbs.sent(KEY, number, status)
        run_with_inline_wakeups(self.completions.poll, self.verbs.cq)

    async def heard(self, *numbers: int, status: WcStatus = WcStatus.SUCCESS) -> None:
        """Likewise, not in a task."""
        running_loop().call_soon(lambda: self.end(*numbers, status=status))
        await settle()

    @property
    def numbers(self) -> list[int]:
        """Of the regions whose memory was posted; -1: an inline message."""
        return [post.address >> 16 if post.lkey else -1 for post in self.verbs.posts]

    @property
    def free(self) -> tuple[int, int]:
        """Places and turns that nobody has."""
        return self.queue.credits, self.lane.rd_atomic_credits


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- what is posted ---


async def test_a_write_is_posted_at_once(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion(70, 3)
    transfer = rig.start(WRITE, region)
    (post,) = verbs.posts
    assert (post.wr_id, post.opcode, post.flags) == (FIRST, WrOpcode.RDMA_WRITE, SIGNALED)
    assert (post.address, post.length, post.lkey, post.num_sge) == (3 << 16, 70, 13, 1)
    assert post.remote == (REMOTE.addr, REMOTE.rkey)
    assert (rig.lane.writes, rig.lane.bytes_written) == (1, 70)
    assert (region.uses, rig.free, rig.lane.transfers_in_flight) == (1, (15, 4), 1)
    assert (transfer.is_over(), transfer.succeeded, transfer.error) == (False, False, 0)
    assert not transfer.is_read


async def test_a_read_fills_the_beginning(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion(200)
    transfer = rig.start(READ, region[50:])
    (post,) = verbs.posts
    assert (post.opcode, post.flags) == (WrOpcode.RDMA_READ, SIGNALED)
    assert (post.address, post.length) == ((1 << 16) + 50, 100)
    assert post.remote == (REMOTE.addr, REMOTE.rkey)
    assert (rig.lane.reads, rig.lane.bytes_read, rig.free) == (1, 100, (15, 3))
    assert transfer.is_read


async def test_a_message_of_registered_memory(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion(MAX_MESSAGE)
    rig.start(SEND, region, None)
    (post,) = verbs.posts
    assert (post.opcode, post.flags) == (WrOpcode.SEND, SIGNALED)
    assert (post.address, post.length, post.lkey) == (1 << 16, MAX_MESSAGE, 11)
    assert (rig.lane.messages, rig.lane.nbytes) == (1, MAX_MESSAGE)


async def test_reads_need_no_fence_and_all_else_has_it(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    rig.lane.fence_flags = FENCE
    rig.start(WRITE, region)
    rig.start(READ, region)
    assert [post.flags for post in verbs.posts] == [SIGNALED | FENCE, SIGNALED]


async def test_short_messages_before_it_need_no_signal_of_their_own(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    rig.lane.send(b"x")
    rig.start(WRITE, region)
    assert rig.lane.unsignaled == 0
    await rig.heard(1)
    assert (rig.free, len(rig.queue)) == ((16, 4), 0)


@pytest.mark.parametrize(
    ("opcode", "memory", "remote"),
    [
        (WRITE, lambda: b"not registered", REMOTE),
        (WRITE, lambda: bytearray(b"not registered"), REMOTE),
        (WRITE, lambda: [FakeRegion()], REMOTE),
        (WRITE, lambda: None, REMOTE),
        (WRITE, lambda: SimpleNamespace(pin=1, segment=(1, 2, 3)), REMOTE),
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
async def test_what_is_unusual_takes_the_long_way(
    verbs: FakeVerbs,
    opcode: int,
    memory: Callable[[], object],
    remote: RemoteBuffer | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is done, or its fault is explained."""
    monkeypatch.setattr("qp_fakes.bytearray", lambda _: bytearray(8), raising=False)
    rig, what = Rig(verbs), memory()
    before = rig.free
    assert rig.lane.start_transfer(opcode, what, remote) is None
    assert (verbs.posted, rig.free, rig.lane.transfers_in_flight) == (0, before, 0)
    if isinstance(what, FakeRegion):
        assert what.uses == 0


async def test_memory_that_is_closed_takes_the_long_way(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    part = region[:80]
    region.close()
    assert rig.lane.start_transfer(WRITE, region, REMOTE) is None
    assert rig.lane.start_transfer(WRITE, part, REMOTE) is None


async def test_on_iwarp_the_peer_must_be_allowed_to_write_what_is_read(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, is_iwarp=True)
    assert rig.lane.start_transfer(READ, FakeRegion(), REMOTE) is None
    rig.start(READ, FakeRegion(access=ACCESS | AccessFlags.REMOTE_WRITE))


async def test_without_turns_nothing_is_read(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=0)
    assert rig.lane.start_transfer(READ, FakeRegion(), REMOTE) is None
    assert rig.lane.queued_reads == 0
    rig.start(WRITE, FakeRegion())


@pytest.mark.parametrize(
    "prepare",
    [
        lambda rig: rig.queue.stop(),
        lambda rig: rig.queue.pause(),
        lambda rig: setattr(rig.lane, "credits", 0),
        lambda rig: setattr(rig.lane, "waiters", 1),
        lambda rig: setattr(rig.lane, "has_unposted", True),
        lambda rig: rig.qp.forget(),
        lambda rig: rig.queue.abandon(),
        lambda rig: setattr(rig.lane, "make_future", None),
    ],
)
async def test_when_something_is_to_be_waited_for_it_takes_the_long_way(
    verbs: FakeVerbs, prepare: Callable[[Rig], None]
) -> None:
    rig, region = Rig(verbs), FakeRegion()
    prepare(rig)
    assert rig.lane.start_transfer(WRITE, region, REMOTE) is None
    assert (verbs.posted, region.uses) == (0, 0)


@pytest.mark.parametrize("arguments", [(), (WRITE,), (WRITE, None), (WRITE, None, REMOTE, 1)])
async def test_a_wrong_call(verbs: FakeVerbs, arguments: tuple[object, ...]) -> None:
    rig = Rig(verbs)
    with pytest.raises(TypeError, match="transfer"):
        rig.lane.start_transfer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rig.lane.start_transfer("x", FakeRegion(), REMOTE)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        rig.lane.start_transfer(WRITE, FakeRegion(), "x")
    with pytest.raises(TypeError):
        fast_path.Transfer()
    assert verbs.posted == 0


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_forked_child_starts_nothing(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    child = os.fork()
    if not child:
        fast_path.note_fork()
        is_none = rig.lane.start_transfer(WRITE, region, REMOTE) is None
        os._exit(42 if is_none and not verbs.posted else 1)
    assert exit_code_of(child) == 42


# --- how it ends ---


async def test_who_waits_is_woken_when_the_device_is_done(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(WRITE, region)
    assert not task.done()
    await rig.heard(0)
    await task
    assert (region.uses, rig.free, rig.lane.transfers_in_flight) == (0, (16, 4), 0)
    assert rig.delivered == 0  # nothing was left for Python


async def test_many_end_in_a_batch(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=16)
    regions = [FakeRegion(number=number) for number in range(1, 11)]
    tasks = [await rig.performing(READ, region) for region in regions]
    await rig.heard(*range(7))
    assert [task.done() for task in tasks] == [True] * 7 + [False] * 3
    assert [region.uses for region in regions] == [0] * 7 + [1] * 3
    await rig.heard(*range(7, 10))
    await asyncio.gather(*tasks)
    assert rig.free == (16, 16)


async def test_on_iwarp_they_end_in_any_order(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, is_iwarp=True)
    regions = [FakeRegion(access=ACCESS | AccessFlags.REMOTE_WRITE) for _ in range(3)]
    tasks = [
        await rig.performing(opcode, region)
        for opcode, region in zip((READ, WRITE, WRITE), regions, strict=True)
    ]
    await rig.heard(2, 1)
    assert [task.done() for task in tasks] == [False, True, True]
    assert [region.uses for region in regions] == [1, 0, 0]
    await rig.heard(0)
    await tasks[0]
    assert regions[0].uses == 0


class Watched(FakeRegion):
    """Notes when its memory may go."""

    def __init__(self, gone: list[int]) -> None:
        super().__init__()
        self._dispose = lambda registration, over: gone.append(1)


async def test_what_is_closed_meanwhile_goes_at_the_end(verbs: FakeVerbs) -> None:
    gone: list[int] = []
    rig, region = Rig(verbs), Watched(gone)
    task = await rig.performing(WRITE, region[10:90])
    region.close()
    assert gone == []
    await rig.heard(0)
    await task
    assert gone == [1]


async def test_a_region_that_is_dropped_lives_until_then(verbs: FakeVerbs) -> None:
    gone: list[int] = []
    rig, region = Rig(verbs), Watched(gone)
    transfer = rig.start(WRITE, region[:80])
    del region
    gc.collect()
    assert gone == []
    await rig.heard(0)
    assert transfer.is_over()
    assert gone == [1]


async def test_one_that_failed_says_why_the_connection_ended(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    first = await rig.performing(READ, region)
    second = await rig.performing(WRITE, region)
    await rig.heard(0, status=WcStatus.REM_ACCESS_ERR)
    await rig.heard(1, status=WcStatus.WR_FLUSH_ERR)
    for task in (first, second):
        with pytest.raises(WorkRequestError, match="RDMA_READ failed: REM_ACCESS_ERR"):
            await task
    assert (rig.failed, region.uses, rig.free) == ([0, 1], 0, (16, 4))


async def test_one_that_will_not_be_heard_of_ends_and_keeps_its_memory(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(WRITE, region)
    rig.owner.fail(PeerClosed("gone"))
    rig.queue.stop_waiting()
    with pytest.raises(PeerClosed):
        await task
    assert region.uses == 1
    rig.queue.abandon()
    assert (region.uses, rig.lane.transfers_in_flight) == (0, 0)


async def test_the_end_of_the_queue_pair_ends_all(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs, turns=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.owner.fail(PeerClosed("gone"))
    rig.queue.abandon()
    for task in tasks:
        with pytest.raises(PeerClosed):
            await task
    assert (region.uses, rig.lane.transfers_in_flight, rig.lane.queued_reads) == (0, 0, 0)


async def test_one_that_the_device_refuses(verbs: FakeVerbs) -> None:
    """libsiw keeps it: its memory is not the user's before the queue pair is gone."""
    rig, region = Rig(verbs), FakeRegion()
    rig.lane.send(b"before")
    verbs.refuse(errno.ENOMEM)
    for opcode in (WRITE, READ, SEND):
        with pytest.raises(VerbsError) as raised:
            await rig.perform(opcode, region)
        assert (raised.value.errno, raised.value.function) == (errno.ENOMEM, "ibv_post_send")
    assert [error.errno for error in rig.owner.breaks if isinstance(error, VerbsError)] == [
        errno.ENOMEM
    ] * 3
    assert (region.uses, rig.queue.credits) == (3, 15)
    assert (rig.lane.writes, rig.lane.reads, rig.lane.messages) == (0, 0, 1)
    assert (rig.lane.next_number, rig.lane.unsignaled) == (1, 1)
    verbs.refuse(0)
    task = await rig.performing(WRITE, region)
    await rig.heard(1)
    await task
    assert region.uses == 3
    rig.queue.abandon()
    assert region.uses == 0


async def test_on_a_closed_loop_nobody_is_woken(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    future = running_loop().create_future()

    def closed(_: None) -> None:
        raise RuntimeError("Event loop is closed")

    rig.lane.make_future = lambda: SimpleNamespace(done=future.done, set_result=closed)
    transfer = rig.start(WRITE, region)
    rig.end(0)
    assert (transfer.is_over(), transfer.succeeded, region.uses) == (True, True, 0)


async def test_what_goes_wrong_at_the_end_of_one_leaves_the_others(verbs: FakeVerbs) -> None:
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
        rig.end(0, 1, 2, 3)
    assert [transfer.is_over() for transfer in (*transfers, message)] == [True] * 4
    assert [region.uses for region in regions] == [0] * 3
    assert rig.free == (16, 4)


async def test_nothing_is_left_of_what_ended(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    transfer = rig.start(WRITE, region)
    future = weakref.ref(transfer.future)
    rig.end(0)
    del transfer
    gc.collect()
    assert future() is None


async def test_a_lane_that_is_dropped_is_collected(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs, turns=1), FakeRegion()
    seen = [weakref.ref(rig.start(READ, region).future) for _ in range(2)]
    del rig
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


# --- cancelling ---


@pytest.mark.parametrize("opcode", [READ, WRITE])
async def test_cancelling_stops_the_waiting_only(verbs: FakeVerbs, opcode: int) -> None:
    """What is posted after a read that was given up waits for its end."""
    rig, region = Rig(verbs), FakeRegion()
    await cancel(await rig.performing(opcode, region))
    assert region.uses == 1
    assert rig.lane.fence_flags == (FENCE if opcode == READ else 0)
    await rig.heard(0)
    assert (region.uses, rig.lane.fence_flags, rig.free) == (0, 0, (16, 4))


async def test_one_that_ended_as_it_was_cancelled_leaves_no_fence(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    task = await rig.performing(READ, region)
    verbs.sent(KEY, 0)
    rig.completions.poll(verbs.cq)
    await cancel(task)
    assert (rig.lane.fence_flags, region.uses) == (0, 0)


# --- turns ---


async def test_so_many_reads_are_under_way_and_the_rest_are_queued(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=2)
    regions = [FakeRegion(number=number) for number in range(1, 8)]
    tasks = [await rig.performing(READ, region) for region in regions]
    assert (rig.numbers, rig.lane.queued_reads, rig.free) == ([1, 2], 5, (14, 0))
    assert [region.uses for region in regions] == [1] * 7
    await rig.heard(0)
    assert rig.numbers == [1, 2, 3]
    calls = verbs.calls
    await rig.heard(1, 2)
    assert rig.numbers == [1, 2, 3, 4, 5]
    assert verbs.calls == calls + 1
    assert {post.flags for post in verbs.posts} == {SIGNALED}
    await rig.heard(3, 4)
    await rig.heard(5, 6)
    await asyncio.gather(*tasks)
    assert (rig.lane.reads, rig.free, rig.delivered) == (7, (16, 2), 0)


async def test_others_do_not_wait_for_queued_reads(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=1)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    rig.start(WRITE, FakeRegion(number=3))
    assert rig.lane.send(b"x") == 0
    assert rig.numbers == [1, 3, -1]


async def test_more_reads_than_there_are_places(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=40, depth=4)
    regions = [FakeRegion(number=number) for number in range(1, 5)]
    for region in regions:
        rig.start(READ, region)
    assert rig.lane.start_transfer(READ, regions[0], REMOTE) is None  # a place is waited for
    assert rig.free == (0, 36)


async def test_many_turns_at_once_are_several_calls(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=40, depth=64)
    rig.lane.rd_atomic_credits = 0
    for number in range(1, 41):
        rig.start(READ, FakeRegion(number=number))
    assert (verbs.calls, rig.lane.queued_reads) == (0, 40)
    rig.lane.rd_atomic_credits = 40
    rig.lane.grant_rd_atomic_credits()
    assert (verbs.calls, rig.lane.queued_reads) == (3, 0)
    assert rig.numbers == list(range(1, 41))
    assert rig.free == (24, 0)


async def test_a_queued_read_waits_for_a_place_too(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=1, depth=4)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    held, rig.lane.credits = rig.lane.credits, 0
    rig.lane.oldest_pending = 1  # as if its place were another's
    rig.lane.rd_atomic_credits += 1
    rig.lane.grant_rd_atomic_credits()
    assert rig.numbers == [1]
    rig.lane.credits = held
    rig.lane.grant_rd_atomic_credits()
    assert rig.numbers == [1, 2]


async def test_a_queued_read_that_is_cancelled_is_never_posted(verbs: FakeVerbs) -> None:
    rig, regions = Rig(verbs, turns=1), [FakeRegion(number=number) for number in range(1, 4)]
    tasks = [await rig.performing(READ, region) for region in regions]
    await cancel(tasks[1])
    assert (regions[1].uses, rig.lane.queued_reads, rig.lane.fence_flags) == (0, 1, 0)
    await rig.heard(0)
    assert rig.numbers == [1, 3]
    await rig.heard(1)
    await tasks[2]
    assert rig.free == (16, 1)


async def test_queued_reads_end_with_the_connection(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs, turns=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.owner.fail(PeerClosed("gone"))
    rig.queue.stop()
    rig.remote.stop()
    for task in tasks[1:]:
        with pytest.raises(PeerClosed):
            await task
    assert (region.uses, verbs.posted) == (1, 1)


async def test_a_queued_read_that_is_dropped_and_then_cancelled(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs, turns=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(3)]
    rig.owner.fail(PeerClosed("gone"))
    rig.queue.stop()
    await cancel(tasks[1])
    assert (rig.lane.queued_reads, rig.lane.transfers_in_flight, region.uses) == (0, 1, 1)
    with pytest.raises(PeerClosed):
        await tasks[2]


async def test_one_that_is_cancelled_as_it_is_refused_still_ends_the_connection(
    verbs: FakeVerbs,
) -> None:
    rig, region = Rig(verbs, turns=1), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(2)]
    verbs.refuse(errno.ENOMEM)
    verbs.sent(KEY, 0)
    rig.completions.poll(verbs.cq)
    await cancel(tasks[1])
    await tasks[0]
    assert len(rig.owner.breaks) == 1


async def test_a_queued_read_gets_the_place_that_nobody_used(verbs: FakeVerbs) -> None:
    """A place that comes back without a completion, though nothing is under way any more."""
    rig = Rig(verbs, turns=1, depth=2)
    for number in (1, 2):
        rig.start(READ, FakeRegion(number=number))
    assert rig.queue.try_reserve()
    rig.lane.credits = -1  # as if the place of the read were another's already, which iWARP has
    rig.end(0)
    assert (rig.numbers, rig.free, rig.lane.queued_reads) == ([1], (0, 1), 1)
    rig.queue.unreserve()
    assert (rig.numbers, rig.free, rig.lane.queued_reads) == ([1, 2], (0, 0), 0)


async def test_a_read_that_waits_for_its_turn_is_counted(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=1)
    for _ in range(3):
        rig.start(READ, FakeRegion())
    assert rig.lane.rd_atomic_waits == 2


async def test_numbers_of_numpy_will_do(verbs: FakeVerbs) -> None:
    class Number:
        def __index__(self) -> int:
            return 5

    rig = Rig(verbs)
    remote: Any = SimpleNamespace(addr=Number(), rkey=Number(), length=200)
    rig.start(WRITE, FakeRegion(), remote)
    assert verbs.posts[0].remote == (5, 5)


async def test_queued_reads_that_the_device_refuses(verbs: FakeVerbs) -> None:
    """Whichever it took: their memory is its own until the queue pair is gone."""
    rig, region = Rig(verbs, turns=2), FakeRegion()
    tasks = [await rig.performing(READ, region) for _ in range(5)]
    verbs.refuse(errno.ENOMEM)
    await rig.heard(0, 1)
    for task in tasks[2:4]:
        with pytest.raises(VerbsError) as raised:
            await task
        assert raised.value.errno == errno.ENOMEM
    assert (region.uses, rig.lane.queued_reads) == (3, 1)
    rig.queue.abandon()
    assert region.uses == 0
    with pytest.raises(VerbsError):
        await tasks[4]


async def test_reads_and_atomics_take_turns(verbs: FakeVerbs) -> None:
    """Those that wait here and those that wait there each get every second one."""
    rig = Rig(verbs, turns=1)
    pieces = [FakeRegion(70, 10), FakeRegion(70, 12)]
    tasks = [await rig.performing(READ, FakeRegion(number=number)) for number in (1, 2)]
    tasks += [asyncio.create_task(rig.remote.read(REMOTE, pieces)) for _ in range(3)]
    await settle()
    tasks += [await rig.performing(READ, FakeRegion(number=number)) for number in (3, 4)]
    for number in range(7):
        assert len(verbs.posts) == number + 1
        await rig.heard(number)
    await asyncio.gather(*tasks)
    assert sorted(rig.numbers) == [1, 2, 3, 4, 10, 10, 10]
    assert rig.numbers[:3] in ([1, 10, 2], [1, 2, 10])
    assert rig.numbers[2:6] in ([2, 10, 3, 10], [10, 3, 10, 4])
    assert rig.free == (16, 1)


async def test_a_turn_that_was_not_used_goes_to_a_queued_read(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, turns=1)
    assert rig.remote._rd_atomic_credits.try_acquire()
    rig.start(READ, FakeRegion())
    assert verbs.posted == 0
    rig.remote._rd_atomic_credits.release()
    assert (verbs.posted, rig.free) == (1, (15, 0))


# --- together with others ---


async def use_long_way(rig: Rig, region: FakeRegion) -> None:
    """As Connection.write(), where the short way is not taken."""
    await rig.remote.write(region, REMOTE, -1)


async def write(rig: Rig, region: FakeRegion) -> None:
    """As Connection.write(), whichever way that takes."""
    transfer = rig.lane.start_transfer(WRITE, region, REMOTE)
    if transfer is None:
        await use_long_way(rig, region)
    else:
        await rig.operations.finish(transfer)


async def test_what_tasks_start_that_are_woken_together_is_one_call(verbs: FakeVerbs) -> None:
    """In their order, whichever way they take; the first makes the chain for the others."""
    rig = Rig(verbs)
    regions = [FakeRegion(number=number) for number in range(1, 7)]
    tasks = await woken(
        lambda: use_long_way(rig, regions[0]),
        lambda: rig.perform(WRITE, regions[1]),
        lambda: rig.perform(READ, regions[2]),
        lambda: use_long_way(rig, regions[3]),
        lambda: rig.perform(SEND, regions[4], None),
        lambda: rig.perform(WRITE, regions[5]),
    )
    assert (verbs.calls, rig.numbers) == (1, [1, 2, 3, 4, 5, 6])
    assert [post.wr_id - FIRST for post in verbs.posts] == list(range(6))
    assert (rig.completions.open_post_lists, rig.lane.batching, rig.lane.has_unposted) == (
        0,
        False,
        False,
    )
    await rig.heard(*range(6))
    await asyncio.gather(*tasks)
    assert rig.free == (16, 4)


async def test_a_short_message_goes_behind_them(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    regions = [FakeRegion(number=number) for number in range(1, 4)]

    def send() -> None:
        assert rig.lane.send(b"in short") == -1
        assert rig.queue.try_reserve()
        rig.queue.post_inline(b"in short")

    await woken(
        lambda: use_long_way(rig, regions[0]),
        lambda: rig.perform(WRITE, regions[1]),
        send,
        lambda: rig.perform(WRITE, regions[2]),
    )
    assert rig.numbers == [1, 2, -1, 3]


async def test_a_full_chain_is_posted_before_the_next(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, depth=4 * MAX_LENGTH)
    region = FakeRegion()

    await woken(*[lambda: write(rig, region)] * (2 * MAX_LENGTH + 1))
    assert verbs.calls == 3
    assert [post.wr_id - FIRST for post in verbs.posts] == list(range(2 * MAX_LENGTH + 1))


async def test_a_refused_chain_ends_all_in_it_but_no_earlier_one(verbs: FakeVerbs) -> None:
    rig = Rig(verbs)
    region = FakeRegion()
    earlier = await rig.performing(WRITE, region)
    verbs.refuse(errno.ENOMEM)
    verbs.accept_sends(1)
    tasks = await woken(
        lambda: use_long_way(rig, region),
        lambda: rig.perform(WRITE, region),
        lambda: rig.perform(READ, region),
    )
    for task in tasks:
        with pytest.raises(VerbsError):
            await task
    assert (len(rig.owner.breaks), region.uses, earlier.done()) == (1, 4, False)
    assert rig.lane.start_transfer(WRITE, region, REMOTE) is None  # nothing behind it
    await rig.heard(0)
    await earlier
    rig.queue.abandon()
    assert region.uses == 0


async def test_a_full_chain_that_is_refused_ends_all_in_it(verbs: FakeVerbs) -> None:
    rig = Rig(verbs, depth=4 * MAX_LENGTH)
    region = FakeRegion()
    await woken(lambda: use_long_way(rig, region), lambda: use_long_way(rig, region))

    verbs.refuse(errno.ENOMEM)
    for task in await woken(*[lambda: write(rig, region)] * (MAX_LENGTH + 1)):
        with pytest.raises(VerbsError):
            await task


async def test_a_read_that_is_queued_meanwhile_begins_when_they_are_posted(
    verbs: FakeVerbs,
) -> None:
    rig = Rig(verbs, turns=1)
    regions = [FakeRegion(number=number) for number in range(1, 4)]
    assert rig.remote._rd_atomic_credits.try_acquire()
    await woken(
        lambda: use_long_way(rig, regions[0]),
        lambda: rig.perform(READ, regions[1]),
        rig.remote._rd_atomic_credits.release,
        lambda: rig.perform(WRITE, regions[2]),
    )
    assert rig.numbers == [1, 3, 2]


# --- polling ---


async def test_polling_until_it_is_over(verbs: FakeVerbs) -> None:
    rig, region = Rig(verbs), FakeRegion()
    transfer = rig.start(WRITE, region)
    verbs.sent(KEY, 0)
    assert rig.completions.poll_for(verbs.cq, 10**9) == 1
    assert transfer.is_over()
    assert rig.completions.notified_at > 0
    with contextlib.suppress(asyncio.CancelledError):
        await transfer.future


# --- Pin ---


async def test_a_pin_counts_uses() -> None:
    pin, ended = fast_path.ReferenceCount(HERE, int(ACCESS)), list[int]()
    assert (pin.pd, pin.access, pin.count, pin.closed) == (HERE, ACCESS, 0, False)
    pin.acquire(HERE)
    pin.acquire(HERE)
    with pytest.raises(ValueError, match="another device"):
        pin.acquire(ELSEWHERE)
    pin.close(lambda: ended.append(pin.count))
    with pytest.raises(ValueError, match="closed"):
        pin.acquire(HERE)
    pin.release()
    assert (pin.count, pin.closed, ended) == (1, True, [])
    pin.release()
    assert ended == [0]


async def test_a_pin_that_nobody_uses_ends_at_once() -> None:
    pin, ended = fast_path.ReferenceCount(HERE, 0), list[int]()
    pin.close(lambda: ended.append(1))
    assert ended == [1]


async def test_a_slice_is_pinned_with_its_region() -> None:
    region = FakeRegion()
    part: MemorySlice = region[10:30][5:]
    assert part.references is region.references
    assert part.segment == ((1 << 16) + 15, 15, 11)
    assert part.addr == (1 << 16) + 15
