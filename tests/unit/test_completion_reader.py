"""CompletionReader: the completions and errors of the C code, in Python."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from simulator.queues import Queues

from aiordma import VerbsError
from aiordma._native import fast_path
from aiordma.dispatch.completion_reader import POLL_BATCH, CompletionReader


class Rig:
    """A CompletionReader of a fake verbs provider, without a device."""

    def __init__(self) -> None:
        self.verbs = Queues()
        self.cq: Any = SimpleNamespace(address=self.verbs.cq)
        self.channel: Any = SimpleNamespace(address=self.verbs.channel)
        self.seen: list[tuple[int, int]] = []
        self.notified: list[int] = []
        self.reader = CompletionReader(self.on_pending)

    def on_pending(self) -> None:
        self.seen += [(wc.wr_id, wc.byte_len) for wc in self.reader.pending()]
        self.notified += self.reader.notified()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.verbs.close()


def test_a_batch_has_at_most_poll_batch_completions(rig: Rig) -> None:
    for number in range(POLL_BATCH + 1):
        rig.verbs.put(1 << 32 | number, number)
    assert [rig.reader.poll(rig.cq) for _ in range(3)] == [POLL_BATCH, 1, 0]
    assert rig.seen == [(1 << 32 | number, number) for number in range(POLL_BATCH + 1)]
    assert list(rig.reader.pending()) == []


def test_a_key_with_pending_work_is_notified_once(rig: Rig) -> None:
    ring = fast_path.ReceiveRingCore(4, 16)
    ring._use(bytearray(64), 0, 0)
    receives = fast_path.ReceiveQueue(ring)
    rig.reader.attach(7, fast_path.SendQueueCore(4, 1, 0), receives)
    rig.verbs.received(7, 2, 5)
    assert rig.reader.poll_for(rig.cq, 1_000_000_000) == 1
    assert (rig.notified, rig.seen, len(receives)) == ([7], [], 1)
    assert list(rig.reader.notified()) == []
    rig.reader.detach(7)
    rig.verbs.received(7, 2, 5)
    rig.reader.poll(rig.cq)
    assert (rig.notified, len(rig.seen)) == ([7], 1)


@pytest.mark.parametrize("result", [-errno.EIO, -1])
def test_polling_a_broken_queue_raises(rig: Rig, result: int) -> None:
    rig.verbs.break_queue(poll=result)
    for call in (rig.reader.poll, lambda cq: rig.reader.poll_for(cq, 1000)):
        with pytest.raises(VerbsError, match="ibv_poll_cq") as caught:
            call(rig.cq)
        assert caught.value.errno == -result


def test_arming_a_broken_queue_raises(rig: Rig) -> None:
    rig.reader.arm(rig.cq)
    rig.verbs.break_queue(arm=errno.EIO)
    with pytest.raises(VerbsError, match="ibv_req_notify_cq") as caught:
        rig.reader.arm(rig.cq)
    assert (caught.value.errno, rig.verbs.arms) == (errno.EIO, 2)


def test_events_are_read_one_by_one(rig: Rig) -> None:
    for _ in range(2):
        rig.verbs.raise_event()
    found = [rig.reader.event(rig.channel) for _ in range(3)]
    assert found == [rig.verbs.cq, rig.verbs.cq, 0]
    assert rig.verbs.acknowledged == 2
    rig.verbs.break_channel()
    with pytest.raises(VerbsError, match="ibv_get_cq_event") as caught:
        rig.reader.event(rig.channel)
    assert caught.value.errno == errno.EIO
