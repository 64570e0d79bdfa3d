"""MessageDataPath: the routing of completions, and the release of resources at the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from fakes.cm import fake_cm, raw_of
from fakes.qp import (
    RECV_WR_ID,
    SEND_WR_ID,
    SLOT_SIZE,
    SLOTS,
    FakeCallbacks,
    FakePages,
    FakePool,
    FakeQueuePair,
    FakeReceivePoster,
    FakeRegion,
    completion,
)
from simulator.queues import Queues

from aiordma import AsyncCmId, ConnectionOptions, RemoteBuffer, VerbsError
from aiordma.cm import CmState
from aiordma.dispatch import loop_device
from aiordma.enums import WcOpcode, WcStatus
from aiordma.loop import running_loop
from aiordma.messages.message_data_path import MessageDataPath
from aiordma.qp import RECEIVE, ReceiveRing
from aiordma.verbs import DeviceAttributes

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

OPTIONS = ConnectionOptions(
    send_depth=16, recv_depth=SLOTS, max_message_size=SLOT_SIZE, recv_backlog=5
)
FLUSHED = WcStatus.WR_FLUSH_ERR


class FakeDevice:
    name = "fake0"
    is_iwarp = False
    attributes = DeviceAttributes(100, 4, 1000, 1 << 30, 16, 16)


class FakeSharedReceives:
    """A SharedReceives that counts its references and stores its consumers."""

    def __init__(self) -> None:
        self.ring = ReceiveRing(SLOTS, SLOT_SIZE)
        self.references = 1
        self.consumers: dict[int, object] = {}

    def acquire(self) -> None:
        self.references += 1

    def release(self) -> None:
        self.references -= 1

    def remove(self, qp_num: int, consumer: object) -> None:
        assert self.consumers.pop(qp_num) is consumer

    def repost(self, slot: int) -> None:
        self.ring.post(slot)


class Rig:
    """A MessageDataPath with a fake queue pair."""

    def __init__(self, cm: AsyncCmId, shared_receives: Any) -> None:
        self.callbacks = FakeCallbacks()
        self.shared_receives = shared_receives
        self.data_path = MessageDataPath(cm, self.callbacks, OPTIONS, shared_receives)
        self.qp, self.pool = FakeQueuePair(16), FakePool(2)
        self.data_path.sends.open(self.qp, self.pool, SEND_WR_ID)  # type: ignore[arg-type]
        self.ring = self.data_path._ring
        pages: Any = FakePages(None, self.ring.slots * SLOT_SIZE, None)  # type: ignore[arg-type]
        self.ring.use_region(pages)
        self.queue = FakeReceivePoster(pages)
        self.ring.post_all(self.queue, RECV_WR_ID)
        if shared_receives is not None:
            self.data_path._qp = SimpleNamespace(number=17)  # type: ignore[assignment]
            shared_receives.consumers[17] = self.data_path

    def arrive(self, message: bytes = b"hello", status: WcStatus = WcStatus.SUCCESS) -> int:
        slot = self.queue.fill(message)
        wc = completion(len(message), status=status)
        if self.shared_receives is None:
            self.data_path.complete(RECEIVE | slot, wc)
        else:  # SharedReceives looks up the consumer of the queue pair
            self.ring.completed()
            self.data_path.received(slot, wc)
        return slot

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        self.data_path.complete(self.qp.posted.popleft(), completion(status=status))

    @property
    def posted(self) -> list[int]:
        assert self.ring.posted == len(self.queue.posted)
        return list(self.queue.posted)


@pytest_asyncio.fixture
async def cm(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncCmId]:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm_id = made.make_id(CmState.CONNECTED)
        device = FakeDevice()
        monkeypatch.setattr(raw_of(cm_id), "device", lambda: device, raising=False)
        yield cm_id
        await cm_id.aclose()
        assert not loop_device._loop_devices.get(running_loop())


@pytest_asyncio.fixture
async def rig(cm: AsyncCmId) -> AsyncIterator[Rig]:
    rig = Rig(cm, None)
    yield rig
    rig.data_path.release()


@pytest_asyncio.fixture
async def sharing_rig(cm: AsyncCmId) -> AsyncIterator[Rig]:
    rig = Rig(cm, FakeSharedReceives())
    yield rig
    if 17 in rig.shared_receives.consumers:
        rig.data_path.release()
    assert (rig.shared_receives.references, rig.shared_receives.consumers) == (1, {})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_message_that_arrived_can_be_received(rig: Rig) -> None:
    rig.arrive(b"hello")
    assert rig.callbacks.messages_arrived == 1
    assert (rig.data_path.receives_posted, len(rig.data_path.receiver)) == (SLOTS - 1, 1)
    assert await rig.data_path.receiver.recv() == b"hello"
    assert rig.posted == [1, 2, 3, 0]


async def test_a_failed_receive_is_reported_and_not_posted_again(rig: Rig) -> None:
    rig.arrive(status=FLUSHED)
    assert rig.callbacks.failed == [WcOpcode.RECV]
    assert rig.callbacks.messages_arrived == 0
    assert rig.posted == [1, 2, 3]
    assert len(rig.data_path.receiver) == 0


async def test_a_flushed_receive_wakes_the_waiting_task(rig: Rig) -> None:
    task = asyncio.create_task(rig.data_path.receiver.recv())
    await settle()
    rig.callbacks.is_drained = True
    rig.callbacks.end = VerbsError(5, "ibv_poll_cq")
    rig.arrive(status=FLUSHED)
    with pytest.raises(VerbsError):
        await task


async def test_the_completion_of_a_request_wakes_its_task(rig: Rig) -> None:
    region = FakeRegion(50, pd=None)
    tasks = [
        asyncio.create_task(rig.data_path.sender.send_registered(region, -1, None)),
        asyncio.create_task(rig.data_path.sender.send_registered(region, -1, None)),
    ]
    await settle()
    rig.end()
    await tasks[0]
    assert (rig.callbacks.requests_completed, region.uses) == (1, 1)
    rig.callbacks.end = VerbsError(5, "ibv_poll_cq")
    rig.end(WcStatus.RETRY_EXC_ERR)
    with pytest.raises(VerbsError):
        await tasks[1]
    assert rig.callbacks.failed == [WcOpcode.SEND]
    assert (rig.callbacks.requests_completed, region.uses) == (2, 0)


async def test_a_failed_request_is_reported_with_its_opcode(rig: Rig) -> None:
    rig.callbacks.end = None
    rig.data_path.remote.negotiated(1)
    rig.data_path.sends.try_reserve()
    rig.data_path.sends.post_inline(b"x")
    rig.end(WcStatus.RETRY_EXC_ERR)
    region = FakeRegion(50, pd=None)
    task = asyncio.create_task(rig.data_path.remote.read(RemoteBuffer(0, 1, 5), region))
    await settle()
    rig.callbacks.end = VerbsError(5, "ibv_poll_cq")
    rig.end(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(VerbsError):
        await task
    assert rig.callbacks.failed == [WcOpcode.SEND, WcOpcode.RDMA_READ]


async def test_snapshot_has_the_statistics_of_the_moment(rig: Rig) -> None:
    for _ in range(3):
        rig.arrive(b"hello")
    rig.data_path.sends.try_reserve()
    rig.data_path.sends.post_inline(b"x")
    held = await rig.data_path.receiver.recv_message()
    stats = rig.data_path.snapshot()
    assert (stats.messages_received, stats.bytes_received) == (3, 15)
    assert (stats.sends_posted, stats.receives_posted) == (1, 1)
    assert (stats.messages_unread, stats.messages_held) == (2, 1)
    held.release()
    assert (stats.receives_posted, stats.messages_held) == (1, 1)  # a snapshot does not change
    assert rig.data_path.snapshot().messages_held == 0


async def test_stop_wakes_all_waiting_tasks(rig: Rig) -> None:
    sends = rig.data_path.sends
    for _ in range(16):
        assert sends.try_reserve()
    rig.data_path.remote.negotiated(1)
    rig.data_path.remote._rd_atomic_credits.try_acquire()
    tasks = [
        asyncio.create_task(sends.reserve()),
        asyncio.create_task(rig.data_path.remote._rd_atomic_credits.acquire()),
    ]
    receiving = asyncio.create_task(rig.data_path.receiver.recv())
    await settle()
    slot = rig.queue.fill(b"")
    rig.ring.completed()
    rig.callbacks.closed_here = True
    rig.data_path.stop()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
        with pytest.raises(Exception, match="closed here"):
            await receiving
    rig.ring.post(slot)
    assert slot not in rig.posted


async def test_release_releases_the_memory_in_flight(cm: AsyncCmId) -> None:
    rig = Rig(cm, None)
    region = FakeRegion(50, pd=None)
    task = asyncio.create_task(rig.data_path.sender.send_registered([region, b"copy"], -1, None))
    await settle()
    rig.data_path.sends.stop_waiting()
    with pytest.raises(Exception, match="closed here"):
        await task
    assert region.uses == 1
    rig.data_path.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_without_shared_receives_messages_are_spilled_on_iwarp_only(
    cm: AsyncCmId, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.data_path.counts_flushes
    for _ in range(SLOTS):
        rig.arrive()
    assert rig.data_path.snapshot().spilled == 0
    monkeypatch.setattr(FakeDevice, "is_iwarp", True)
    iwarp = Rig(cm, None)
    assert not iwarp.data_path.counts_flushes
    for _ in range(SLOTS + 1):
        iwarp.arrive()
    assert iwarp.data_path.snapshot().spilled == 3
    assert iwarp.callbacks.failures == []
    iwarp.arrive()  # the sixth of a recv_backlog of 5
    assert len(iwarp.callbacks.failures) == 1
    iwarp.data_path.release()


@pytest.mark.parametrize("is_iwarp", [False, True])
async def test_signaling_is_selective_except_on_iwarp(
    cm: AsyncCmId, monkeypatch: pytest.MonkeyPatch, is_iwarp: bool
) -> None:
    monkeypatch.setattr(FakeDevice, "is_iwarp", is_iwarp)
    rig = Rig(cm, None)
    await rig.data_path.sender.send_copy(b"x", 1, -1)
    assert rig.qp.is_signalled(0) is is_iwarp
    rig.data_path.release()


# --- with shared receives ---


async def test_each_connection_holds_a_reference_until_its_queue_pair_is_destroyed(
    sharing_rig: Rig,
) -> None:
    assert sharing_rig.shared_receives.references == 2
    assert not sharing_rig.data_path.counts_flushes
    sharing_rig.data_path.release()
    assert sharing_rig.shared_receives.references == 1


async def test_a_data_path_without_a_queue_pair_removes_no_consumer(cm: AsyncCmId) -> None:
    shared_receives: Any = FakeSharedReceives()
    data_path = MessageDataPath(cm, FakeCallbacks(), OPTIONS, shared_receives)
    assert shared_receives.references == 2
    data_path.release()
    assert shared_receives.references == 1


async def test_a_flushed_shared_slot_is_posted_again(sharing_rig: Rig) -> None:
    slot = sharing_rig.arrive(status=FLUSHED)
    assert sharing_rig.posted == [1, 2, 3, slot]
    assert sharing_rig.callbacks.failed == [WcOpcode.RECV]


async def test_messages_in_shared_slots_are_spilled(sharing_rig: Rig) -> None:
    for _ in range(5):
        sharing_rig.arrive()
    assert sharing_rig.data_path.snapshot().spilled == 3
    assert len(sharing_rig.posted) == 2


async def test_stop_does_not_stop_a_shared_ring(sharing_rig: Rig) -> None:
    slot = sharing_rig.arrive()
    sharing_rig.data_path.stop()
    assert await sharing_rig.data_path.receiver.recv() == b"hello"
    assert sharing_rig.posted == [1, 2, 3, slot]


async def test_release_posts_the_shared_slots_of_untaken_messages(sharing_rig: Rig) -> None:
    first, second = sharing_rig.arrive(), sharing_rig.arrive()
    message = await sharing_rig.data_path.receiver.recv_message()
    sharing_rig.data_path.release()
    assert sharing_rig.posted == [2, 3, second]
    assert bytes(message.data) == b"hello"  # a Message outlives its connection
    message.release()
    assert sharing_rig.posted == [2, 3, second, first]


# --- the fast path in C ---


async def test_snapshot_includes_messages_that_the_core_sent(rig: Rig) -> None:
    verbs = Queues()
    core = rig.data_path.sends.core
    core.open(verbs, verbs.qp_cell, SEND_WR_ID)
    assert [core.send(data) for data in (b"one", b"three")] == [0, 0]
    assert rig.data_path.sends.try_reserve()
    rig.data_path.sends.post_inline(b"x")
    rig.data_path.sends.stats.messages_sent += 1
    rig.data_path.sends.stats.bytes_sent += 1
    stats = rig.data_path.snapshot()
    assert (stats.messages_sent, stats.bytes_sent, stats.sends_posted) == (3, 9, 3)
    assert list(rig.qp.posted) == [2]
    assert rig.data_path.sends.credits == 13
    rig.data_path.stop()
    assert core.send(b"x") == -1
    verbs.close()


async def test_a_notification_reaches_the_receiver_and_the_callbacks(rig: Rig) -> None:
    task = asyncio.create_task(rig.data_path.receiver.recv())
    await settle()
    slot = rig.queue.fill(b"hello")
    rig.ring.completed()
    rig.data_path.receiver.queue.append(slot, 5, 0, 0)
    await settle()
    assert (rig.callbacks.messages_arrived, task.done()) == (0, False)
    rig.data_path._on_notified()
    assert await task == b"hello"
    assert rig.callbacks.messages_arrived == 1


@pytest.mark.parametrize("closed_here", [False, True])
async def test_after_stop_messages_can_be_taken_unless_this_side_closed(
    rig: Rig, closed_here: bool
) -> None:
    rig.arrive(b"hello")
    rig.callbacks.closed_here = closed_here
    rig.data_path.stop()
    assert rig.data_path.receiver.take() == (None if closed_here else b"hello")


async def test_release_ends_polling(cm: AsyncCmId) -> None:
    rig = Rig(cm, None)
    dispatcher: Any = rig.data_path._resources.loop_device.dispatcher
    before = sys.getrefcount(dispatcher)
    cq: Any = SimpleNamespace(address=1)
    rig.data_path.receiver.polling.open(dispatcher, cq, 5, True)
    rig.data_path.sends.core.set_polling(dispatcher, 1, 5)
    polling = sys.getrefcount(dispatcher)
    rig.data_path.release()
    released = polling - sys.getrefcount(dispatcher)
    assert (polling - before, released) == (3, 3)
    assert rig.data_path.receiver.queue.poll_budget == -1
