"""ReceiveRing: slots are posted, completed with messages, and posted again."""

from __future__ import annotations

import random

import pytest
from fakes.qp import RECV_WR_ID, SLOT_SIZE, SLOTS, FakePages, FakeReceivePoster

from aiordma import VerbsError
from aiordma.enums import AccessFlags
from aiordma.qp import ReceiveRing, receive_ring


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> ReceiveRing:
    monkeypatch.setattr(receive_ring, "AllocatedRegion", FakePages)
    ring = ReceiveRing(SLOTS, SLOT_SIZE)
    ring.allocate(object())  # type: ignore[arg-type]
    return ring


@pytest.fixture
def queue(ring: ReceiveRing) -> FakeReceivePoster:
    queue = FakeReceivePoster(pages_of(ring))
    ring.post_all(queue, RECV_WR_ID)
    return queue


def pages_of(ring: ReceiveRing) -> FakePages:
    assert isinstance(ring._region, FakePages)
    return ring._region


def receive(ring: ReceiveRing, queue: FakeReceivePoster, message: bytes) -> int:
    slot = queue.fill(message)
    ring.completed()
    return slot


def test_the_memory_is_registered_for_local_writes(ring: ReceiveRing) -> None:
    pages = pages_of(ring)
    assert len(pages.memory) == SLOTS * SLOT_SIZE
    assert pages.access == AccessFlags.LOCAL_WRITE


def test_every_slot_is_posted_at_first(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    assert list(queue.posted) == list(range(SLOTS))
    assert ring.posted == SLOTS


def test_a_view_of_a_message_is_not_a_copy(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    messages = [b"", b"one", bytes(range(SLOT_SIZE))]
    slots = [receive(ring, queue, message) for message in messages]
    assert ring.posted == SLOTS - 3
    views = [ring.view(slot, len(message)) for slot, message in zip(slots, messages, strict=True)]
    assert [bytes(view) for view in views] == messages
    pages_of(ring).memory[SLOT_SIZE] = ord("O")
    assert bytes(views[1]) == b"One"  # the view is not a copy
    for slot in slots:
        ring.post(slot)
    assert ring.posted == SLOTS


def test_a_slot_posted_again_is_the_last_of_the_queue(
    ring: ReceiveRing, queue: FakeReceivePoster
) -> None:
    slot = receive(ring, queue, b"one")
    assert list(queue.posted) == [1, 2, 3]
    ring.post(slot)
    assert list(queue.posted) == [1, 2, 3, 0]


def test_after_stop_slots_are_not_posted(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    slot = receive(ring, queue, b"last")
    ring.stop()
    ring.post(slot)
    assert (ring.posted, len(queue.posted)) == (SLOTS - 1, SLOTS - 1)
    assert bytes(ring.view(slot, 4)) == b"last"


def test_a_flushed_ring_has_nothing_posted(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    slot = receive(ring, queue, b"last")
    for _ in range(SLOTS - 1):
        ring.completed()
    assert ring.posted == 0
    assert bytes(ring.view(slot, 4)) == b"last"


def test_a_refused_slot_is_not_counted(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    slot = receive(ring, queue, b"one")
    queue.refuses = True
    with pytest.raises(VerbsError, match="ibv_post_recv"):
        ring.post(slot)
    assert ring.posted == SLOTS - 1


def test_a_slot_is_counted_before_it_is_posted(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    slot, counted = receive(ring, queue, b"one"), list[int]()
    queue.on_post = lambda: counted.append(ring.posted)
    ring.post(slot)
    assert counted == [SLOTS]


def test_close_deregisters_the_memory(ring: ReceiveRing, queue: FakeReceivePoster) -> None:
    slot = receive(ring, queue, b"one")
    ring.close()
    assert pages_of(ring).closed
    ring.post(slot)
    assert slot not in queue.posted


def test_a_ring_without_memory_can_be_closed() -> None:
    ReceiveRing(SLOTS, SLOT_SIZE).close()


@pytest.mark.parametrize("seed", range(10))
def test_a_long_exchange_keeps_every_byte(
    ring: ReceiveRing, queue: FakeReceivePoster, seed: int
) -> None:
    source = random.Random(seed)
    unread: list[tuple[int, bytes]] = []
    for _ in range(2000):
        if queue.posted and source.random() < 0.5:
            message = source.randbytes(source.randrange(SLOT_SIZE + 1))
            unread.append((receive(ring, queue, message), message))
        elif unread:
            slot, message = unread.pop(source.randrange(len(unread)))
            assert ring.view(slot, len(message)) == message
            ring.post(slot)
        assert ring.posted == len(queue.posted) == SLOTS - len(unread)
