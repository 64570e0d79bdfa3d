"""The C halves of a stream refuse numbers that would lead beyond a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiordma._native import fast_path
from aiordma.streams import wire
from aiordma.streams.inbound import Inbound
from aiordma.streams.outbound import Outbound
from aiordma.streams.wire import Segment

SGL_SIZE = wire.TARGETS * wire.SEGMENT_SIZE


def inbound() -> Inbound:
    return Inbound(Segment(0x10000, 11, 64), 16)


def outbound() -> Outbound:
    return Outbound(memoryview(bytearray(SGL_SIZE)), "little", 0)


def data_path(received: int = 64, copied: int = 64, depth: int = 8) -> None:
    kind: Any = fast_path.StreamDataPathCore
    parts = (
        fast_path.SendQueueCore(8, 1, 16),
        fast_path.ReceiveRingCore(4, 4),
        inbound(),
        outbound(),
        fast_path.SendRing(64),
    )
    kind(*parts, bytearray(received), bytearray(copied), 0x20000, 7, 16, depth, False)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: inbound().consume(1), "fewer bytes are readable"),
        (lambda: inbound().take_update(), "start"),
        (lambda: inbound().start(0x5000, 55, 0, False), "no targets"),
        (lambda: outbound().send(1), "no room"),
        (lambda: Outbound(memoryview(bytearray(SGL_SIZE - 1)), "little", 0), "too small"),
        (lambda: data_path(received=63), "smaller than its ring"),
        (lambda: data_path(copied=63), "smaller than its ring"),
        (lambda: data_path(depth=0), "smaller than its ring"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


def test_parts_of_the_wrong_type_are_refused() -> None:
    kind: Any = fast_path.StreamDataPathCore
    with pytest.raises(TypeError, match="SendQueueCore expected"):
        kind(*[object()] * 5, bytearray(64), bytearray(64), 0, 0, 0, 8, False)


def test_a_path_without_a_queue_pair_sends_and_reads_nothing() -> None:
    sends, ring = fast_path.SendQueueCore(8, 1, 16), fast_path.SendRing(64)
    path = fast_path.StreamDataPathCore(
        sends,
        fast_path.ReceiveRingCore(4, 4),
        inbound(),
        outbound(),
        ring,
        bytearray(64),
        bytearray(64),
        0x20000,
        7,
        16,
        8,
        False,
    )
    assert (path.send(b"data"), path.write(b"data"), path.room, ring.free) == (0, 0, 0, 64)
    assert (path.read(100), path.read(0), path.read_into(bytearray(8))) == (None, None, None)
    assert path.read_into(bytearray()) is None
    path.post_updates()
    path.wake()
    assert path.take_notification() == (0, 0)
    with pytest.raises(BufferError):
        path.read_into(b"read only")
