"""CompletionReader: the completions and errors of the C code, in Python."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from simulator.queues import Queues

from aiordma import VerbsError
from aiordma._native import fast_path
from aiordma.dispatch.completion_reader import POLL_BATCH, CompletionReader


class Rig:
    """A CompletionReader of queues without a network."""

    def __init__(self, verbs: Queues) -> None:
        self.cq: Any = SimpleNamespace(address=verbs.cq)
        self.channel: Any = SimpleNamespace(address=verbs.channel)
        self.seen: list[tuple[int, int]] = []
        self.notified: list[int] = []
        self.reader = CompletionReader(self.on_pending)

    def on_pending(self) -> None:
        self.seen += [(wc.wr_id, wc.byte_len) for wc in self.reader.pending()]
        self.notified += self.reader.notified()


def test_completions_for_python_come_in_batches(verbs: Queues) -> None:
    rig = Rig(verbs)
    for number in range(POLL_BATCH + 1):
        verbs.put(1 << 32 | number, number)
    assert [rig.reader.poll(rig.cq) for _ in range(3)] == [POLL_BATCH, 1, 0]
    assert rig.seen == [(1 << 32 | number, number) for number in range(POLL_BATCH + 1)]
    assert (list(rig.reader.pending()), list(rig.reader.notified())) == ([], [])


def test_a_key_with_pending_work_is_notified_until_it_is_detached(verbs: Queues) -> None:
    rig = Rig(verbs)
    ring = fast_path.ReceiveRingCore(4, 16)
    ring._use(bytearray(64), 0, 0)
    receives = fast_path.ReceiveQueue(ring)
    rig.reader.attach(7, fast_path.SendQueueCore(4, 1, 0), receives)
    verbs.received(7, 2, 5)
    assert rig.reader.poll_for(rig.cq, 1_000_000_000) == 1
    assert (rig.notified, rig.seen, len(receives)) == ([7], [], 1)
    rig.reader.detach(7)
    verbs.received(7, 2, 5)
    rig.reader.poll(rig.cq)
    assert (rig.notified, len(rig.seen)) == ([7], 1)


def test_failures_of_the_queue_and_of_the_channel_raise(verbs: Queues) -> None:
    rig = Rig(verbs)
    reader = rig.reader
    reader.arm(rig.cq)
    verbs.raise_event()
    assert [reader.event(rig.channel) for _ in range(2)] == [verbs.cq, 0]
    verbs.break_queue(poll=-errno.EIO, arm=errno.EIO)
    verbs.break_channel()
    for call, function in (
        (lambda: reader.poll(rig.cq), "ibv_poll_cq"),
        (lambda: reader.poll_for(rig.cq, 1000), "ibv_poll_cq"),
        (lambda: reader.arm(rig.cq), "ibv_req_notify_cq"),
        (lambda: reader.event(rig.channel), "ibv_get_cq_event"),
    ):
        with pytest.raises(VerbsError, match=function) as caught:
            call()
        assert caught.value.errno == errno.EIO
    assert verbs.arms == 2
