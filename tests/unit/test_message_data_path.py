"""Traffic: where the completions of a queue pair go, and what is let go of at its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from cm_fakes import fake_cm, raw_of
from qp_fakes import (
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
from verbs_fakes import FakeVerbs

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


class FakeShares:
    """SharedReceives whose users and takers are seen."""

    def __init__(self) -> None:
        self.ring = ReceiveRing(SLOTS, SLOT_SIZE)
        self.users = 1
        self.takers: dict[int, object] = {}

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1

    def remove(self, qp_num: int, taker: object) -> None:
        assert self.takers.pop(qp_num) is taker

    def repost(self, slot: int) -> None:
        self.ring.post(slot)


class Rig:
    """A Traffic as if its queue pair were made."""

    def __init__(self, cm: AsyncCmId, shares: Any) -> None:
        self.owner = FakeCallbacks()
        self.shares = shares
        self.traffic = MessageDataPath(cm, self.owner, OPTIONS, shares)
        self.qp, self.pool = FakeQueuePair(16), FakePool(2)
        self.traffic.sends.open(self.qp, self.pool, SEND_WR_ID)  # type: ignore[arg-type]
        self.ring = self.traffic._ring
        pages: Any = FakePages(None, self.ring.slots * SLOT_SIZE, None)  # type: ignore[arg-type]
        self.ring.use_region(pages)
        self.queue = FakeReceivePoster(pages)
        self.ring.post_all(self.queue, RECV_WR_ID)
        if shares is not None:
            self.traffic._qp = SimpleNamespace(number=17)  # type: ignore[assignment]
            shares.takers[17] = self.traffic

    def arrive(self, message: bytes = b"hello", status: WcStatus = WcStatus.SUCCESS) -> int:
        slot = self.queue.fill(message)
        wc = completion(len(message), status=status)
        if self.shares is None:
            self.traffic.complete(RECEIVE | slot, wc)
        else:  # SharedReceives looks up whose it is
            self.ring.completed()
            self.traffic.received(slot, wc)
        return slot

    def end(self, status: WcStatus = WcStatus.SUCCESS) -> None:
        self.traffic.complete(self.qp.posted.popleft(), completion(status=status))

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
    rig.traffic.release()


@pytest_asyncio.fixture
async def sharing(cm: AsyncCmId) -> AsyncIterator[Rig]:
    rig = Rig(cm, FakeShares())
    yield rig
    if 17 in rig.shares.takers:
        rig.traffic.release()
    assert (rig.shares.users, rig.shares.takers) == (1, {})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_message_that_arrived_can_be_received(rig: Rig) -> None:
    rig.arrive(b"hello")
    assert rig.owner.arrivals == 1
    assert (rig.traffic.receives_posted, len(rig.traffic.receiver)) == (SLOTS - 1, 1)
    assert await rig.traffic.receiver.recv() == b"hello"
    assert rig.posted == [1, 2, 3, 0]


async def test_a_receive_that_failed_is_told_and_stays_here(rig: Rig) -> None:
    rig.arrive(status=FLUSHED)
    assert rig.owner.failed == [WcOpcode.RECV]
    assert rig.owner.arrivals == 0
    assert rig.posted == [1, 2, 3]
    assert len(rig.traffic.receiver) == 0


async def test_a_flushed_receive_has_the_waiting_task_look(rig: Rig) -> None:
    task = asyncio.create_task(rig.traffic.receiver.recv())
    await settle()
    rig.owner.is_drained = True
    rig.owner.end = VerbsError(5, "ibv_poll_cq")
    rig.arrive(status=FLUSHED)
    with pytest.raises(VerbsError):
        await task


async def test_the_end_of_a_request_wakes_who_waits_for_it(rig: Rig) -> None:
    region = FakeRegion(50, pd=None)
    tasks = [
        asyncio.create_task(rig.traffic.sender.send_registered(region, -1, None)),
        asyncio.create_task(rig.traffic.sender.send_registered(region, -1, None)),
    ]
    await settle()
    rig.end()
    await tasks[0]
    assert (rig.owner.requests_ended, region.uses) == (1, 1)
    rig.owner.end = VerbsError(5, "ibv_poll_cq")
    rig.end(WcStatus.RETRY_EXC_ERR)
    with pytest.raises(VerbsError):
        await tasks[1]
    assert rig.owner.failed == [WcOpcode.SEND]
    assert (rig.owner.requests_ended, region.uses) == (2, 0)


async def test_a_failed_request_is_told_by_what_it_was(rig: Rig) -> None:
    rig.owner.end = None
    rig.traffic.remote.negotiated(1)
    rig.traffic.sends.try_reserve()
    rig.traffic.sends.post_inline(b"x")
    rig.end(WcStatus.RETRY_EXC_ERR)
    region = FakeRegion(50, pd=None)
    task = asyncio.create_task(rig.traffic.remote.read(RemoteBuffer(0, 1, 5), region))
    await settle()
    rig.owner.end = VerbsError(5, "ibv_poll_cq")
    rig.end(WcStatus.REM_ACCESS_ERR)
    with pytest.raises(VerbsError):
        await task
    assert rig.owner.failed == [WcOpcode.SEND, WcOpcode.RDMA_READ]


async def test_the_numbers_of_the_moment(rig: Rig) -> None:
    for _ in range(3):
        rig.arrive(b"hello")
    rig.traffic.sends.try_reserve()
    rig.traffic.sends.post_inline(b"x")
    held = await rig.traffic.receiver.recv_message()
    stats = rig.traffic.snapshot()
    assert (stats.messages_received, stats.bytes_received) == (3, 15)
    assert (stats.sends_posted, stats.receives_posted) == (1, 1)
    assert (stats.messages_unread, stats.messages_held) == (2, 1)
    held.release()
    assert (stats.receives_posted, stats.messages_held) == (1, 1)  # it is of that moment
    assert rig.traffic.snapshot().messages_held == 0


async def test_stopping_lets_everybody_go(rig: Rig) -> None:
    sends = rig.traffic.sends
    for _ in range(16):
        assert sends.try_reserve()
    rig.traffic.remote.negotiated(1)
    rig.traffic.remote._rd_atomic_credits.try_acquire()
    tasks = [
        asyncio.create_task(sends.reserve()),
        asyncio.create_task(rig.traffic.remote._rd_atomic_credits.acquire()),
    ]
    receiving = asyncio.create_task(rig.traffic.receiver.recv())
    await settle()
    slot = rig.queue.fill(b"")
    rig.ring.completed()
    rig.owner.closed_here = True
    rig.traffic.stop()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
        with pytest.raises(Exception, match="closed here"):
            await receiving
    rig.ring.post(slot)
    assert slot not in rig.posted


async def test_what_was_lent_comes_back_at_the_end(cm: AsyncCmId) -> None:
    rig = Rig(cm, None)
    region = FakeRegion(50, pd=None)
    task = asyncio.create_task(rig.traffic.sender.send_registered([region, b"copy"], -1, None))
    await settle()
    rig.traffic.sends.stop_waiting()
    with pytest.raises(Exception, match="closed here"):
        await task
    assert region.uses == 1
    rig.traffic.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_without_sharing_nothing_is_spilled_but_on_iwarp(
    cm: AsyncCmId, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.traffic.counts_flushes
    for _ in range(SLOTS):
        rig.arrive()
    assert rig.traffic.snapshot().spilled == 0
    monkeypatch.setattr(FakeDevice, "is_iwarp", True)
    iwarp = Rig(cm, None)
    assert not iwarp.traffic.counts_flushes
    for _ in range(SLOTS + 1):
        iwarp.arrive()
    assert iwarp.traffic.snapshot().spilled == 3
    assert iwarp.owner.breaks == []
    iwarp.arrive()  # the sixth of a recv_backlog of 5
    assert len(iwarp.owner.breaks) == 1
    iwarp.traffic.release()


@pytest.mark.parametrize("is_iwarp", [False, True])
async def test_signalling_is_selective_but_on_iwarp(
    cm: AsyncCmId, monkeypatch: pytest.MonkeyPatch, is_iwarp: bool
) -> None:
    monkeypatch.setattr(FakeDevice, "is_iwarp", is_iwarp)
    rig = Rig(cm, None)
    await rig.traffic.sender.send_copy(b"x", 1, -1)
    assert rig.qp.is_signalled(0) is is_iwarp
    rig.traffic.release()


# --- with shared receives ---


async def test_each_connection_is_a_user_until_its_queue_pair_is_gone(sharing: Rig) -> None:
    assert sharing.shares.users == 2
    assert not sharing.traffic.counts_flushes
    sharing.traffic.release()
    assert sharing.shares.users == 1


async def test_a_queue_pair_that_was_never_made_takes_from_nobody(cm: AsyncCmId) -> None:
    shares: Any = FakeShares()
    traffic = MessageDataPath(cm, FakeCallbacks(), OPTIONS, shares)
    assert shares.users == 2
    traffic.release()
    assert shares.users == 1


async def test_a_shared_slot_that_was_flushed_is_posted_again(sharing: Rig) -> None:
    slot = sharing.arrive(status=FLUSHED)
    assert sharing.posted == [1, 2, 3, slot]
    assert sharing.owner.failed == [WcOpcode.RECV]


async def test_shared_slots_are_kept_by_nobody(sharing: Rig) -> None:
    for _ in range(5):
        sharing.arrive()
    assert sharing.traffic.snapshot().spilled == 3
    assert len(sharing.posted) == 2


async def test_the_end_of_one_does_not_stop_the_others(sharing: Rig) -> None:
    slot = sharing.arrive()
    sharing.traffic.stop()
    assert await sharing.traffic.receiver.recv() == b"hello"
    assert sharing.posted == [1, 2, 3, slot]


async def test_what_nobody_took_goes_back_to_the_others(sharing: Rig) -> None:
    first, second = sharing.arrive(), sharing.arrive()
    message = await sharing.traffic.receiver.recv_message()
    sharing.traffic.release()
    assert sharing.posted == [2, 3, second]
    assert bytes(message.data) == b"hello"  # it outlives the connection
    message.release()
    assert sharing.posted == [2, 3, second, first]


# --- what is done in C ---


async def test_what_the_lane_has_sent_counts_too(rig: Rig, library: Path) -> None:
    verbs = FakeVerbs(library)
    lane = rig.traffic.sends.core
    lane.open(verbs, verbs.qp_cell, SEND_WR_ID)
    assert [lane.send(data) for data in (b"one", b"three")] == [0, 0]
    assert rig.traffic.sends.try_reserve()
    rig.traffic.sends.post_inline(b"x")
    rig.traffic.sends.stats.messages_sent += 1
    rig.traffic.sends.stats.bytes_sent += 1
    stats = rig.traffic.snapshot()
    assert (stats.messages_sent, stats.bytes_sent, stats.sends_posted) == (3, 9, 3)
    assert list(rig.qp.posted) == [2]
    assert rig.traffic.sends.credits == 13
    rig.traffic.stop()
    assert lane.send(b"x") == -1
    verbs.close()


async def test_to_look_tells_receiver_and_owner(rig: Rig) -> None:
    task = asyncio.create_task(rig.traffic.receiver.recv())
    await settle()
    slot = rig.queue.fill(b"hello")
    rig.ring.completed()
    rig.traffic.receiver.queue.append(slot, 5, 0, 0)
    await settle()
    assert (rig.owner.arrivals, task.done()) == (0, False)
    rig.traffic._on_notified()
    assert await task == b"hello"
    assert rig.owner.arrivals == 1


@pytest.mark.parametrize("closed_here", [False, True])
async def test_after_stopping_only_what_was_not_closed_here_is_taken(
    rig: Rig, closed_here: bool
) -> None:
    rig.arrive(b"hello")
    rig.owner.closed_here = closed_here
    rig.traffic.stop()
    assert rig.traffic.receiver.take() == (None if closed_here else b"hello")


async def test_after_the_release_nobody_looks(cm: AsyncCmId) -> None:
    rig = Rig(cm, None)
    completions: Any = rig.traffic._resources.loop_device.dispatcher
    count = sys.getrefcount(completions)
    cq: Any = SimpleNamespace(address=1)
    rig.traffic.receiver.polling.open(completions, cq, 5, True)
    rig.traffic.sends.core.set_polling(completions, 1, 5)
    held = sys.getrefcount(completions)
    rig.traffic.release()
    release = held - sys.getrefcount(completions)
    assert (held - count, release) == (3, 3)
    assert rig.traffic.receiver.queue.poll_budget == -1
