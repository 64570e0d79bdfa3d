"""SharedReceives: one set of receive buffers, many that take from it; and who shares it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
from cm_fakes import fake_cm, raw_of
from qp_fakes import SLOT_SIZE, SLOTS, FakePages, FakeReceivePoster, completion

from aiordma import ConnectionOptions, VerbsError
from aiordma.loop import running_loop
from aiordma.messages import listener as listener_module
from aiordma.messages.listener import SharedReceivesByDevice
from aiordma.qp import SharedReceives, receive_ring, shared_receives
from aiordma.verbs import DeviceAttributes, SharedReceiveQueueCaps

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

KEY = 9


class FakeSrq(FakeReceivePoster):
    """A shared receive queue of SLOTS slots."""

    def __init__(self, pages: FakePages) -> None:
        super().__init__(pages, KEY << 32)
        self.closed = 0

    def close(self) -> None:
        assert not self.pages.closed, "the memory went first"
        self.closed += 1


class FakeShared:
    """What LoopDevice does, counted."""

    def __init__(self) -> None:
        self.pd = object()
        self.sinks: dict[int, object] = {}
        self.reserved = 0
        self.users = 1

    def attach(self, sink: object) -> int:
        self.sinks[KEY] = sink
        return KEY

    def detach(self, key: int) -> None:
        del self.sinks[key]

    def reserve(self, entries: int) -> str:
        self.reserved += entries
        return "the completion queue"

    def unreserve(self, queue: object, entries: int) -> None:
        assert queue == "the completion queue"
        self.reserved -= entries

    def release(self) -> None:
        self.users -= 1


class FakeDevice:
    """A device, of which nothing is asked but which one it is."""


class ReceiveConsumer:
    def __init__(self) -> None:
        self.got: list[tuple[int, object]] = []
        self.failures: list[VerbsError] = []

    def received(self, slot: int, wc: object) -> None:
        self.got.append((slot, wc))

    def device_failed(self, error: VerbsError) -> None:
        self.failures.append(error)


class Rig:
    """A SharedReceives of SLOTS slots, on fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = FakeShared()
        self.pages: list[FakePages] = []
        self.srqs: list[FakeSrq] = []
        self.on_create: Callable[[], None] = lambda: None
        self.device = FakeDevice()
        monkeypatch.setattr(receive_ring, "AllocatedRegion", self._allocate)
        monkeypatch.setattr(shared_receives, "LoopDevice", self)
        monkeypatch.setattr(shared_receives, "SharedReceiveQueue", self)
        device: Any = self.device
        self.receives = SharedReceives(running_loop(), device, SLOTS, SLOT_SIZE)

    def _allocate(self, pd: object, nbytes: int, access: Any) -> FakePages:
        assert pd is self.shared.pd
        self.pages.append(FakePages(pd, nbytes, access))
        return self.pages[-1]

    def of(self, loop: object, device: object) -> FakeShared:
        """In place of LoopDevice."""
        assert device is self.device
        return self.shared

    def create(self, pd: object, caps: SharedReceiveQueueCaps) -> FakeSrq:
        """In place of SharedReceiveQueue."""
        assert (pd, caps.max_wr) == (self.shared.pd, SLOTS)
        self.on_create()
        self.srqs.append(FakeSrq(self.pages[-1]))
        return self.srqs[-1]

    @property
    def srq(self) -> FakeSrq:
        return self.srqs[-1]

    def fill(self, qp_num: int = 17) -> int:
        """The device fills a slot for a queue pair."""
        slot = self.srq.fill(b"hello")
        self.receives.complete(slot, completion(5, qp_num=qp_num))
        return slot

    @property
    def posted(self) -> list[int]:
        assert self.receives.ring.posted == len(self.srq.posted)
        return list(self.srq.posted)

    @property
    def is_gone(self) -> bool:
        return not self.shared.users


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def stays_so() -> None:
    await asyncio.sleep(0.02)


# --- opening ---


def opened(rig: Rig) -> tuple[Any, Any]:
    return rig.receives.open()


async def test_all_is_made_when_it_is_needed_first(rig: Rig) -> None:
    assert (rig.srqs, rig.shared.reserved) == ([], 0)
    assert opened(rig) == (rig.srq, "the completion queue")
    assert opened(rig) == (rig.srq, "the completion queue")
    assert len(rig.srqs) == len(rig.pages) == 1
    assert rig.shared.reserved == SLOTS
    assert rig.posted == [0, 1, 2, 3]


async def test_those_who_open_it_at_once_get_the_same(rig: Rig) -> None:
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(rig.receives.open) for _ in range(8)]
        assert len({id(call.result()[0]) for call in calls}) == 1
    assert len(rig.srqs) == 1
    assert rig.shared.reserved == SLOTS


def refused() -> None:
    raise VerbsError(errno.ENOMEM, "ibv_create_srq")


async def test_what_could_not_be_made_leaves_nothing_behind(rig: Rig) -> None:
    rig.on_create = refused
    with pytest.raises(VerbsError, match="ibv_create_srq"):
        rig.receives.open()
    assert rig.pages[0].closed
    await eventually(lambda: rig.shared.reserved == 0)
    rig.receives.release()
    await eventually(lambda: rig.is_gone)
    assert rig.shared.reserved == 0


async def test_a_queue_that_takes_no_receives_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSrq, "post_recv", lambda *args: refused())
    with pytest.raises(VerbsError):
        rig.receives.open()
    assert rig.srq.closed == 1
    assert rig.pages[0].closed
    await eventually(lambda: rig.shared.reserved == 0)


async def test_what_could_not_be_made_can_be_made_later(rig: Rig) -> None:
    rig.on_create = refused
    with pytest.raises(VerbsError):
        rig.receives.open()
    rig.on_create = lambda: None
    rig.receives.open()
    assert rig.posted == [0, 1, 2, 3]
    assert not rig.pages[1].closed


async def test_receives_that_were_posted_in_vain_do_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[int] = []

    def post_two(srq: FakeSrq, wr_id: int, *memory: int) -> None:
        posted.append(wr_id)
        if len(posted) > 2:
            refused()

    with monkeypatch.context() as patch:
        patch.setattr(FakeSrq, "post_recv", post_two)
        with pytest.raises(VerbsError):
            rig.receives.open()
    rig.receives.open()
    assert rig.posted == [0, 1, 2, 3]


# --- taking ---


async def test_a_message_goes_to_the_queue_pair_that_took_the_buffer(rig: Rig) -> None:
    rig.receives.open()
    one, other = ReceiveConsumer(), ReceiveConsumer()
    rig.receives.add(17, one)
    rig.receives.add(18, other)
    first, second, third = rig.fill(18), rig.fill(17), rig.fill(18)
    assert [slot for slot, _ in other.got] == [first, third]
    assert [slot for slot, _ in one.got] == [second]
    assert rig.posted == [3]
    for slot in (third, first, second):
        rig.receives.repost(slot)
    assert rig.posted == [3, third, first, second]


async def test_what_a_queue_pair_took_that_is_gone_is_posted_again(rig: Rig) -> None:
    rig.receives.open()
    taker = ReceiveConsumer()
    rig.receives.add(17, taker)
    slot = rig.fill(99)
    assert rig.posted == [1, 2, 3, slot]
    rig.receives.remove(17, taker)
    slot = rig.fill(17)
    assert rig.posted == [2, 3, 0, slot]
    assert taker.got == []


async def test_a_number_that_another_has_by_now_stays_the_others(rig: Rig) -> None:
    rig.receives.open()
    gone, taker = ReceiveConsumer(), ReceiveConsumer()
    rig.receives.add(17, gone)
    rig.receives.add(17, taker)
    rig.receives.remove(17, gone)
    rig.fill(17)
    assert (len(gone.got), len(taker.got)) == (0, 1)
    rig.receives.remove(17, taker)
    rig.receives.remove(17, taker)


async def test_a_queue_that_takes_no_more_ends_all_that_share_it(rig: Rig) -> None:
    rig.receives.open()
    takers = [ReceiveConsumer() for _ in range(3)]
    for number, taker in enumerate(takers):
        rig.receives.add(number, taker)
    slots = [rig.fill(0), rig.fill(1)]
    rig.srq.refuses = True
    rig.receives.repost(slots[0])
    assert [[error.errno for error in taker.failures] for taker in takers] == [[errno.ENOMEM]] * 3
    rig.receives.repost(slots[1])  # nothing is posted any more, and nobody told again
    assert [len(taker.failures) for taker in takers] == [1] * 3
    assert rig.posted == [2, 3]


async def test_a_device_that_fails_ends_all_that_share_it(rig: Rig) -> None:
    rig.receives.open()
    takers = [ReceiveConsumer() for _ in range(3)]
    for number, taker in enumerate(takers):
        rig.receives.add(number, taker)
    slot = rig.fill(0)
    error = VerbsError(errno.EIO, "ibv_poll_cq")
    rig.receives.device_failed(error)
    assert [taker.failures for taker in takers] == [[error]] * 3
    rig.receives.repost(slot)
    assert rig.posted == [1, 2, 3]


# --- the end ---


async def test_it_lives_as_long_as_it_has_users(rig: Rig) -> None:
    rig.receives.open()
    for _ in range(3):
        rig.receives.acquire()
    for _ in range(3):
        rig.receives.release()
        await stays_so()
        assert rig.srq.closed == 0
        assert (rig.shared.users, rig.shared.reserved) == (1, SLOTS)
    slot = rig.fill()
    assert slot in rig.posted
    rig.receives.release()
    await eventually(lambda: rig.is_gone)
    await stays_so()
    assert (rig.srq.closed, rig.pages[0].closed) == (1, True)
    assert (rig.shared.users, rig.shared.reserved, rig.shared.sinks) == (0, 0, {})


async def test_one_that_nobody_opened_is_let_go_too(rig: Rig) -> None:
    rig.receives.release()
    await eventually(lambda: rig.is_gone)
    assert (rig.shared.users, rig.shared.reserved, rig.shared.sinks) == (0, 0, {})
    assert rig.srqs == []


async def test_a_message_that_is_released_after_the_end_is_not_posted(rig: Rig) -> None:
    rig.receives.open()
    taker = ReceiveConsumer()
    rig.receives.add(17, taker)
    first, second = rig.fill(), rig.fill()
    rig.receives.release()
    rig.receives.repost(first)  # it is about to be destroyed
    await eventually(lambda: rig.is_gone)
    rig.receives.repost(second)
    assert list(rig.srq.posted) == [2, 3]


async def test_a_queue_that_cannot_be_destroyed_is_let_go_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(srq: FakeSrq) -> None:
        raise VerbsError(errno.EBUSY, "ibv_destroy_srq")

    rig.receives.open()
    monkeypatch.setattr(FakeSrq, "close", fail)
    rig.receives.release()
    await eventually(lambda: rig.is_gone)
    assert "ibv_destroy_srq" in caplog.text
    assert rig.shared.reserved == 0


# --- what a listener shares ---


class FakeReceives:
    made: list[Any]

    def __init__(self, loop: object, device: object, depth: int, slot_size: int) -> None:
        self.device, self.depth, self.slot_size = device, depth, slot_size
        self.users = 1
        self.made.append(self)

    def release(self) -> None:
        self.users -= 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    FakeReceives.made = []
    monkeypatch.setattr(listener_module, "SharedReceives", FakeReceives)
    return FakeReceives.made


class FakeId:
    """As much of an id as Sharing asks for."""

    def __init__(self, device: object) -> None:
        self.loop = None
        self._device = device

    def device(self) -> object:
        return self._device


SHARED = ConnectionOptions(shared_recv_depth=50, max_message_size=1000)
FIRST: Any = FakeId("the first device")
SECOND: Any = FakeId("the second device")


def share(sharing: SharedReceivesByDevice, cm: Any, options: ConnectionOptions) -> Any:
    return sharing.receives(cm, options)


async def test_connections_of_a_listener_share_what_is_on_their_device(
    made: list[Any],
) -> None:
    sharing = SharedReceivesByDevice(SHARED)
    assert made == []
    first = share(sharing, FIRST, SHARED)
    assert (made[0].device, made[0].depth, made[0].slot_size) == ("the first device", 50, 1000)
    assert share(sharing, FIRST, SHARED) is first
    assert share(sharing, SECOND, SHARED) is made[1]
    assert made[1].device == "the second device"


@pytest.mark.parametrize("own", [SHARED, ConnectionOptions()])
async def test_one_that_does_not_want_to_share_has_buffers_of_its_own(
    made: list[Any], own: ConnectionOptions
) -> None:
    sharing = SharedReceivesByDevice(own)
    assert share(sharing, FIRST, ConnectionOptions(max_message_size=5000)) is None
    assert made == []


@pytest.mark.parametrize(
    ("listens", "wants"),
    [
        (SHARED, ConnectionOptions(shared_recv_depth=50, max_message_size=1001)),
        (ConnectionOptions(), SHARED),
    ],
)
async def test_one_that_wants_more_than_is_shared_is_refused(
    made: list[Any], listens: ConnectionOptions, wants: ConnectionOptions
) -> None:
    with pytest.raises(ValueError, match="are for listen"):
        share(SharedReceivesByDevice(listens), FIRST, wants)
    assert made == []


async def test_smaller_messages_may_be_wanted(made: list[Any]) -> None:
    sharing = SharedReceivesByDevice(SHARED)
    small = ConnectionOptions(shared_recv_depth=1, max_message_size=999)
    assert share(sharing, FIRST, small) is made[0]
    assert made[0].slot_size == 1000


async def test_closing_gives_up_each_share_once(made: list[Any]) -> None:
    sharing = SharedReceivesByDevice(SHARED)
    share(sharing, FIRST, SHARED)
    share(sharing, SECOND, SHARED)
    sharing.close()
    sharing.close()
    assert [one.users for one in made] == [0, 0]
    assert share(sharing, FIRST, SHARED) is None
    assert len(made) == 2


class SharingDevice:
    name = "shared0"
    is_iwarp = False
    attributes = DeviceAttributes(100, 4, 1000, 1 << 30, 1, 1, max_srq_wr=50)


async def test_a_listener_that_is_closed_gives_up_what_it_shares(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cm(running_loop(), monkeypatch) as fakes:
        async with fakes.make_id() as cm_id:
            monkeypatch.setattr(raw_of(cm_id), "device", SharingDevice, raising=False)
            cm_id.listen()
            listener = listener_module.Listener([cm_id], SHARED)
            share(listener._shared_receives, cm_id, SHARED)
            assert made[0].users == 1
            await listener.aclose()
            assert made[0].users == 0
