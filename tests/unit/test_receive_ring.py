"""ReceiveRing: slots that go to the device, come back with messages, and go again."""

from __future__ import annotations

import errno
import random
from collections import deque

import pytest

from aiordma import VerbsError
from aiordma.datapath import ReceiveRing, receive_ring
from aiordma.enums import AccessFlags

FIRST_WR_ID = (5 << 32) | (1 << 31)
SLOTS, SLOT_SIZE = 4, 64


class FakeRegion:
    """Memory that looks registered."""

    def __init__(self, pd: object, nbytes: int, access: AccessFlags) -> None:
        self.memory = bytearray(nbytes)
        self.view = memoryview(self.memory)
        self.address = 0x7F00_0000_0000
        self.lkey = 99
        self.access = access
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeQueuePair:
    """A receive queue: it fills posted slots in the order in which they were posted."""

    def __init__(self, region: FakeRegion) -> None:
        self.region = region
        self.posted: deque[int] = deque()
        self.refuses = False

    def post_recvs(
        self, first_wr_id: int, address: int, slot_size: int, count: int, lkey: int
    ) -> None:
        for slot in range(count):
            self.post_recv(first_wr_id + slot, address + slot * slot_size, slot_size, lkey)

    def post_recv(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        if self.refuses:
            raise VerbsError(errno.ENOMEM, "ibv_post_recv")
        slot = wr_id - FIRST_WR_ID
        assert slot not in self.posted, f"slot {slot} is posted twice"
        assert 0 <= slot < SLOTS
        assert address == self.region.address + slot * SLOT_SIZE
        assert (length, lkey) == (SLOT_SIZE, self.region.lkey)
        self.posted.append(slot)

    def receive(self, message: bytes) -> tuple[int, int]:
        slot = self.posted.popleft()
        start = slot * SLOT_SIZE
        self.region.memory[start : start + len(message)] = message
        return slot, len(message)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> ReceiveRing:
    monkeypatch.setattr(receive_ring, "AllocatedRegion", FakeRegion)
    ring = ReceiveRing(SLOTS, SLOT_SIZE)
    ring.allocate(object())  # type: ignore[arg-type]
    return ring


@pytest.fixture
def qp(ring: ReceiveRing) -> FakeQueuePair:
    assert isinstance(ring._region, FakeRegion)
    qp = FakeQueuePair(ring._region)
    ring.post_all(qp, FIRST_WR_ID)  # type: ignore[arg-type]
    return qp


def region_of(ring: ReceiveRing) -> FakeRegion:
    assert isinstance(ring._region, FakeRegion)
    return ring._region


def test_the_memory_is_for_the_device_to_write(ring: ReceiveRing) -> None:
    region = region_of(ring)
    assert len(region.memory) == SLOTS * SLOT_SIZE
    assert region.access == AccessFlags.LOCAL_WRITE


def test_every_slot_is_posted_at_first(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    assert list(qp.posted) == list(range(SLOTS))
    assert (ring.posted, len(ring)) == (SLOTS, 0)


def test_messages_are_taken_in_the_order_they_came(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    messages = [b"", b"one", bytes(range(SLOT_SIZE))]
    for message in messages:
        ring.arrived(*qp.receive(message))
    assert (ring.posted, len(ring)) == (SLOTS - 3, 3)
    assert [ring.take() for _ in messages] == list(enumerate(messages))
    assert (ring.posted, len(ring)) == (SLOTS - 3, 0)
    for slot in range(3):
        ring.post(slot)
    assert ring.posted == SLOTS


def test_a_taken_slot_goes_to_the_end_of_the_queue(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    ring.arrived(*qp.receive(b"one"))
    slot, _ = ring.take()
    assert list(qp.posted) == [1, 2, 3]
    ring.post(slot)
    assert list(qp.posted) == [1, 2, 3, 0]


def test_after_the_end_slots_stay_here(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    ring.arrived(*qp.receive(b"last"))
    assert ring.take() == (0, b"last")
    assert (ring.posted, len(qp.posted)) == (SLOTS - 1, SLOTS - 1)


def test_a_flushed_ring_has_nothing_posted(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    ring.arrived(*qp.receive(b"last"))
    for _ in range(SLOTS - 1):
        ring.flushed()
    assert (ring.posted, len(ring)) == (0, 1)
    assert ring.take() == (0, b"last")


def test_what_was_taken_is_a_copy(ring: ReceiveRing, qp: FakeQueuePair) -> None:
    ring.arrived(*qp.receive(b"before"))
    slot, message = ring.take()
    ring.post(slot)
    region_of(ring).memory[:6] = b"after!"
    assert message == b"before"


def test_a_slot_that_the_device_refuses_is_not_counted(
    ring: ReceiveRing, qp: FakeQueuePair
) -> None:
    ring.arrived(*qp.receive(b"one"))
    qp.refuses = True
    slot, message = ring.take()
    assert message == b"one"
    with pytest.raises(VerbsError, match="ibv_post_recv"):
        ring.post(slot)
    assert (ring.posted, len(ring)) == (SLOTS - 1, 0)


def test_closing_unpins_the_memory(ring: ReceiveRing) -> None:
    ring.close()
    assert region_of(ring).closed


@pytest.mark.parametrize("seed", range(10))
def test_a_long_exchange_keeps_every_byte(ring: ReceiveRing, qp: FakeQueuePair, seed: int) -> None:
    source = random.Random(seed)
    sent: deque[bytes] = deque()
    for _ in range(2000):
        if qp.posted and source.random() < 0.5:
            message = source.randbytes(source.randrange(SLOT_SIZE + 1))
            sent.append(message)
            ring.arrived(*qp.receive(message))
        elif sent:
            slot, message = ring.take()
            assert message == sent.popleft()
            ring.post(slot)
        assert len(ring) == len(sent)
        assert ring.posted == len(qp.posted) == SLOTS - len(sent)
