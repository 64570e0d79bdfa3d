"""Inbound: what came, what can be read, and what is granted for it."""

from __future__ import annotations

import dataclasses

import pytest
from stream_fakes import BUFFER, BUFFER_KEY, Pair, Script, settings, started

from aiordma import ProtocolError
from aiordma.streams.protocol import OutgoingMessage
from aiordma.streams.wire import (
    MAX_TRANSFER,
    SEGMENT_SIZE,
    Op,
    Segment,
    pack_message,
    pack_segment,
    unpack_message,
    unpack_segment,
)


def test_what_came_can_be_read() -> None:
    script = started(buffer=64)
    inbound = script.protocol.inbound
    script.hear(Op.DATA, 20)
    assert (inbound.readable(100), inbound.readable(5), inbound.available) == ((0, 20), (0, 5), 20)
    inbound.consume(5)
    assert inbound.readable(100) == (5, 15)


def test_what_is_to_be_read_ends_with_the_ring() -> None:
    script = started(buffer=64)
    inbound = script.protocol.inbound
    script.consume(50)
    script.said()
    script.hear(Op.DATA, 14)
    script.hear(Op.DATA, 30)
    assert (inbound.available, inbound.readable(100)) == (44, (50, 14))
    inbound.consume(14)
    assert inbound.readable(100) == (0, 30)


def test_of_an_odd_buffer_the_last_byte_is_not_used() -> None:
    script = started(buffer=7)
    script.hear(Op.DATA, 3)
    script.hear(Op.DATA, 3)
    assert script.protocol.inbound.readable(100) == (0, 6)
    script.protocol.inbound.consume(6)
    assert [unpack_segment(request.payload, "little") for request in script.said()] == [
        Segment(BUFFER, BUFFER_KEY, 3),
        Segment(BUFFER + 3, BUFFER_KEY, 3),
    ]


@pytest.mark.parametrize("nbytes", [65, MAX_TRANSFER])
def test_more_data_than_was_announced_are_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes written, but had room for 64"):
        started(buffer=64).hear(Op.DATA, nbytes)


def test_what_is_not_read_is_not_announced_again() -> None:
    script = started(buffer=64)
    script.hear(Op.DATA, 64)
    assert script.said() == []
    with pytest.raises(ProtocolError, match="1 bytes written, but had room for 0"):
        script.hear(Op.DATA, 1)


def test_a_half_is_announced_again_when_it_is_consumed() -> None:
    script = started(buffer=64, messages=100)
    script.hear(Op.DATA, 40)
    script.protocol.inbound.consume(31)
    assert script.said() == []
    script.protocol.inbound.consume(1)
    targets = script.peer.targets
    assert script.said() == [
        OutgoingMessage(
            pack_message(Op.CREDIT, 101),
            pack_segment(Segment(BUFFER, BUFFER_KEY, 32), "little"),
            Segment(targets.addr, targets.key, SEGMENT_SIZE),
        )
    ]


@pytest.mark.parametrize("entries", [2, 3, 5])
def test_the_peers_targets_are_written_in_turn(entries: int) -> None:
    script = Script(settings(buffer=64))
    targets = Segment(0x5000, 55, entries)
    script.peer = dataclasses.replace(script.peer, targets=targets)
    script.start()
    requests = script.said()
    for _ in range(10):
        script.consume(32)
        requests += script.said()
    assert [request.target.addr - 0x5000 for request in requests] == [
        number % entries * SEGMENT_SIZE for number in range(1, 12)
    ]
    offsets = [unpack_segment(request.payload, "little").addr - BUFFER for request in requests]
    assert offsets == [32, 0] * 5 + [32]


def test_credits_are_granted_after_half_of_the_messages() -> None:
    script = started(buffer=1 << 20, messages=16)
    for number in range(1, 25):
        script.hear(Op.DATA, 1)
        grants = [OutgoingMessage(pack_message(Op.CREDIT, number + 16))] if number % 8 == 0 else []
        assert script.said() == grants


def test_a_buffer_comes_with_credits() -> None:
    script = started(buffer=64, messages=16)
    script.consume(32, at_once=8)
    assert [unpack_message(request.message) for request in script.said()] == [(Op.CREDIT, 20)]
    for number in range(1, 9):
        assert script.said() == []
        script.hear(Op.DATA, 1)
        assert script.protocol.inbound.has_update == (number == 8)


def test_mappings_are_counted_like_data() -> None:
    script = started(buffer=64, messages=16, mappings=2)
    for _ in range(8):
        script.hear(Op.IOMAP, 1)
    assert script.said() == [OutgoingMessage(pack_message(Op.CREDIT, 24))]


@pytest.mark.parametrize("sends_messages", [False, True])
def test_counters_wrap_around(sends_messages: bool) -> None:
    how = settings(buffer=64, messages=50, sends_messages=sends_messages)
    pair = Pair(how, how).start()
    one, other = pair.sides
    for number in range(70_000):
        assert one.write(bytes([number & 0xFF])) == 1
        one.deliver()
        assert other.read(10) == bytes([number & 0xFF])
        if other.on_the_way:
            pair.settle()
    assert len(one.written) > 1 << 16
    # The wrapped counters are exact: a peer that does not read still stops this side.
    while one.write(b"x"):
        pass
    assert len(one.undelivered) <= 50
