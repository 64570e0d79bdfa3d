"""SharedReceives: receive buffers that several connections share."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
from fakes.cm import fake_cm, raw_of
from fakes.qp import SLOT_SIZE, SLOTS, FakePages, FakeReceivePoster, completion

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
        assert not self.pages.closed, "the memory was closed before the queue"
        self.closed += 1


class FakeLoopDevice:
    """A LoopDevice that counts its users and its reserved entries."""

    def __init__(self) -> None:
        self.pd = object()
        self.handlers: dict[int, object] = {}
        self.reserved = 0
        self.users = 1

    def attach(self, handler: object) -> int:
        self.handlers[KEY] = handler
        return KEY

    def detach(self, key: int) -> None:
        del self.handlers[key]

    def reserve(self, entries: int) -> str:
        self.reserved += entries
        return "the completion queue"

    def unreserve(self, queue: object, entries: int) -> None:
        assert queue == "the completion queue"
        self.reserved -= entries

    def release(self) -> None:
        self.users -= 1


class FakeDevice:
    """A device without methods: only its identity is compared."""


class ReceiveConsumer:
    def __init__(self) -> None:
        self.got: list[tuple[int, object]] = []
        self.failures: list[VerbsError] = []

    def received(self, slot: int, wc: object) -> None:
        self.got.append((slot, wc))

    def device_failed(self, error: VerbsError) -> None:
        self.failures.append(error)


class Rig:
    """A SharedReceives of SLOTS slots, on a FakeLoopDevice and FakeSrqs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop_device = FakeLoopDevice()
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
        assert pd is self.loop_device.pd
        self.pages.append(FakePages(pd, nbytes, access))
        return self.pages[-1]

    def of(self, loop: object, device: object) -> FakeLoopDevice:
        """Replace LoopDevice.of()."""
        assert device is self.device
        return self.loop_device

    def create(self, pd: object, caps: SharedReceiveQueueCaps) -> FakeSrq:
        """Replace SharedReceiveQueue.create()."""
        assert (pd, caps.max_wr) == (self.loop_device.pd, SLOTS)
        self.on_create()
        self.srqs.append(FakeSrq(self.pages[-1]))
        return self.srqs[-1]

    @property
    def srq(self) -> FakeSrq:
        return self.srqs[-1]

    def fill(self, qp_num: int = 17) -> int:
        """Complete the next slot with a message for a queue pair. Return the slot."""
        slot = self.srq.fill(b"hello")
        self.receives.complete(slot, completion(5, qp_num=qp_num))
        return slot

    @property
    def posted(self) -> list[int]:
        assert self.receives.ring.posted == len(self.srq.posted)
        return list(self.srq.posted)

    @property
    def is_released(self) -> bool:
        return not self.loop_device.users


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    await asyncio.sleep(0.02)


# --- opening ---


def opened(rig: Rig) -> tuple[Any, Any]:
    return rig.receives.open()


async def test_the_first_open_makes_everything(rig: Rig) -> None:
    assert (rig.srqs, rig.loop_device.reserved) == ([], 0)
    assert opened(rig) == (rig.srq, "the completion queue")
    assert opened(rig) == (rig.srq, "the completion queue")
    assert len(rig.srqs) == len(rig.pages) == 1
    assert rig.loop_device.reserved == SLOTS
    assert rig.posted == [0, 1, 2, 3]


async def test_concurrent_opens_return_the_same_queue(rig: Rig) -> None:
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(rig.receives.open) for _ in range(8)]
        assert len({id(call.result()[0]) for call in calls}) == 1
    assert len(rig.srqs) == 1
    assert rig.loop_device.reserved == SLOTS


def refused() -> None:
    raise VerbsError(errno.ENOMEM, "ibv_create_srq")


async def test_a_failed_creation_releases_everything(rig: Rig) -> None:
    rig.on_create = refused
    with pytest.raises(VerbsError, match="ibv_create_srq"):
        rig.receives.open()
    assert rig.pages[0].closed
    await eventually(lambda: rig.loop_device.reserved == 0)
    rig.receives.release()
    await eventually(lambda: rig.is_released)
    assert rig.loop_device.reserved == 0


async def test_a_queue_that_refuses_receives_releases_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSrq, "post_recv", lambda *args: refused())
    with pytest.raises(VerbsError):
        rig.receives.open()
    assert rig.srq.closed == 1
    assert rig.pages[0].closed
    await eventually(lambda: rig.loop_device.reserved == 0)


async def test_open_can_be_repeated_after_a_failure(rig: Rig) -> None:
    rig.on_create = refused
    with pytest.raises(VerbsError):
        rig.receives.open()
    rig.on_create = lambda: None
    rig.receives.open()
    assert rig.posted == [0, 1, 2, 3]
    assert not rig.pages[1].closed


async def test_receives_of_a_failed_open_are_not_counted(
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


# --- consumers ---


async def test_a_message_goes_to_the_consumer_of_its_queue_pair(rig: Rig) -> None:
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


async def test_the_slot_of_a_destroyed_queue_pair_is_posted_again(rig: Rig) -> None:
    rig.receives.open()
    consumer = ReceiveConsumer()
    rig.receives.add(17, consumer)
    slot = rig.fill(99)
    assert rig.posted == [1, 2, 3, slot]
    rig.receives.remove(17, consumer)
    slot = rig.fill(17)
    assert rig.posted == [2, 3, 0, slot]
    assert consumer.got == []


async def test_removing_an_old_consumer_keeps_the_new_one_of_its_number(rig: Rig) -> None:
    rig.receives.open()
    removed, consumer = ReceiveConsumer(), ReceiveConsumer()
    rig.receives.add(17, removed)
    rig.receives.add(17, consumer)
    rig.receives.remove(17, removed)
    rig.fill(17)
    assert (len(removed.got), len(consumer.got)) == (0, 1)
    rig.receives.remove(17, consumer)
    rig.receives.remove(17, consumer)


async def test_a_refused_slot_ends_all_consumers(rig: Rig) -> None:
    rig.receives.open()
    consumers = [ReceiveConsumer() for _ in range(3)]
    for number, consumer in enumerate(consumers):
        rig.receives.add(number, consumer)
    slots = [rig.fill(0), rig.fill(1)]
    rig.srq.refuses = True
    rig.receives.repost(slots[0])
    assert [[error.errno for error in consumer.failures] for consumer in consumers] == [
        [errno.ENOMEM]
    ] * 3
    rig.receives.repost(slots[1])  # not posted, and no consumer is notified
    assert [len(consumer.failures) for consumer in consumers] == [1] * 3
    assert rig.posted == [2, 3]


async def test_a_failed_device_ends_all_consumers(rig: Rig) -> None:
    rig.receives.open()
    consumers = [ReceiveConsumer() for _ in range(3)]
    for number, consumer in enumerate(consumers):
        rig.receives.add(number, consumer)
    slot = rig.fill(0)
    error = VerbsError(errno.EIO, "ibv_poll_cq")
    rig.receives.device_failed(error)
    assert [consumer.failures for consumer in consumers] == [[error]] * 3
    rig.receives.repost(slot)
    assert rig.posted == [1, 2, 3]


# --- the end ---


async def test_shared_receives_exist_as_long_as_they_have_users(rig: Rig) -> None:
    rig.receives.open()
    for _ in range(3):
        rig.receives.acquire()
    for _ in range(3):
        rig.receives.release()
        await settle()
        assert rig.srq.closed == 0
        assert (rig.loop_device.users, rig.loop_device.reserved) == (1, SLOTS)
    slot = rig.fill()
    assert slot in rig.posted
    rig.receives.release()
    await eventually(lambda: rig.is_released)
    await settle()
    assert (rig.srq.closed, rig.pages[0].closed) == (1, True)
    assert (rig.loop_device.users, rig.loop_device.reserved, rig.loop_device.handlers) == (0, 0, {})


async def test_unopened_shared_receives_are_released(rig: Rig) -> None:
    rig.receives.release()
    await eventually(lambda: rig.is_released)
    assert (rig.loop_device.users, rig.loop_device.reserved, rig.loop_device.handlers) == (0, 0, {})
    assert rig.srqs == []


async def test_a_slot_is_not_posted_after_the_last_release(rig: Rig) -> None:
    rig.receives.open()
    consumer = ReceiveConsumer()
    rig.receives.add(17, consumer)
    first, second = rig.fill(), rig.fill()
    rig.receives.release()
    rig.receives.repost(first)  # it will soon be destroyed
    await eventually(lambda: rig.is_released)
    rig.receives.repost(second)
    assert list(rig.srq.posted) == [2, 3]


async def test_a_failure_to_destroy_the_queue_is_logged_and_all_else_released(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(srq: FakeSrq) -> None:
        raise VerbsError(errno.EBUSY, "ibv_destroy_srq")

    rig.receives.open()
    monkeypatch.setattr(FakeSrq, "close", fail)
    rig.receives.release()
    await eventually(lambda: rig.is_released)
    assert "ibv_destroy_srq" in caplog.text
    assert rig.loop_device.reserved == 0


# --- the shared receives of a listener ---


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
    """The attributes of an id that SharedReceivesByDevice uses."""

    def __init__(self, device: object) -> None:
        self.loop = None
        self._device = device

    def device(self) -> object:
        return self._device


SHARED = ConnectionOptions(shared_recv_depth=50, max_message_size=1000)
FIRST: Any = FakeId("the first device")
SECOND: Any = FakeId("the second device")


def share(shares: SharedReceivesByDevice, cm: Any, options: ConnectionOptions) -> Any:
    return shares.receives(cm, options)


async def test_connections_of_a_listener_share_receives_per_device(
    made: list[Any],
) -> None:
    shares = SharedReceivesByDevice(SHARED)
    assert made == []
    first = share(shares, FIRST, SHARED)
    assert (made[0].device, made[0].depth, made[0].slot_size) == ("the first device", 50, 1000)
    assert share(shares, FIRST, SHARED) is first
    assert share(shares, SECOND, SHARED) is made[1]
    assert made[1].device == "the second device"


@pytest.mark.parametrize("own", [SHARED, ConnectionOptions()])
async def test_a_connection_can_have_its_own_buffers(
    made: list[Any], own: ConnectionOptions
) -> None:
    shares = SharedReceivesByDevice(own)
    assert share(shares, FIRST, ConnectionOptions(max_message_size=5000)) is None
    assert made == []


@pytest.mark.parametrize(
    ("listener_options", "own_options"),
    [
        (SHARED, ConnectionOptions(shared_recv_depth=50, max_message_size=1001)),
        (ConnectionOptions(), SHARED),
    ],
)
async def test_options_beyond_the_listeners_are_refused(
    made: list[Any], listener_options: ConnectionOptions, own_options: ConnectionOptions
) -> None:
    with pytest.raises(ValueError, match="are for listen"):
        share(SharedReceivesByDevice(listener_options), FIRST, own_options)
    assert made == []


async def test_smaller_messages_are_accepted(made: list[Any]) -> None:
    shares = SharedReceivesByDevice(SHARED)
    small = ConnectionOptions(shared_recv_depth=1, max_message_size=999)
    assert share(shares, FIRST, small) is made[0]
    assert made[0].slot_size == 1000


async def test_close_releases_each_shared_queue_once(made: list[Any]) -> None:
    shares = SharedReceivesByDevice(SHARED)
    share(shares, FIRST, SHARED)
    share(shares, SECOND, SHARED)
    shares.close()
    shares.close()
    assert [one.users for one in made] == [0, 0]
    assert share(shares, FIRST, SHARED) is None
    assert len(made) == 2


class SharingDevice:
    name = "shared0"
    is_iwarp = False
    attributes = DeviceAttributes(100, 4, 1000, 1 << 30, 1, 1, max_srq_wr=50)


async def test_closing_a_listener_releases_its_shared_receives(
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
