"""Inbound: received bytes, readable bytes, and the credits and buffers for the peer."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.streams import BUFFER, BUFFER_KEY, Pair, Script, settings, started

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


def test_received_bytes_can_be_read() -> None:
    script = started(buffer=64)
    inbound = script.protocol.inbound
    script.receive(Op.DATA, 20)
    assert (inbound.readable(100), inbound.readable(5), inbound.available) == ((0, 20), (0, 5), 20)
    inbound.consume(5)
    assert inbound.readable(100) == (5, 15)


def test_readable_bytes_end_at_the_end_of_the_ring() -> None:
    script = started(buffer=64)
    inbound = script.protocol.inbound
    script.consume(50)
    script.posted()
    script.receive(Op.DATA, 14)
    script.receive(Op.DATA, 30)
    assert (inbound.available, inbound.readable(100)) == (44, (50, 14))
    inbound.consume(14)
    assert inbound.readable(100) == (0, 30)


def test_the_last_byte_of_an_odd_buffer_is_not_used() -> None:
    script = started(buffer=7)
    script.receive(Op.DATA, 3)
    script.receive(Op.DATA, 3)
    assert script.protocol.inbound.readable(100) == (0, 6)
    script.protocol.inbound.consume(6)
    assert [unpack_segment(request.payload, "little") for request in script.posted()] == [
        Segment(BUFFER, BUFFER_KEY, 3),
        Segment(BUFFER + 3, BUFFER_KEY, 3),
    ]


@pytest.mark.parametrize("nbytes", [65, MAX_TRANSFER])
def test_more_data_than_was_announced_are_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes written, but had room for 64"):
        started(buffer=64).receive(Op.DATA, nbytes)


def test_a_half_that_is_not_read_is_not_announced_again() -> None:
    script = started(buffer=64)
    script.receive(Op.DATA, 64)
    assert script.posted() == []
    with pytest.raises(ProtocolError, match="1 bytes written, but had room for 0"):
        script.receive(Op.DATA, 1)


def test_a_half_is_announced_again_when_it_is_consumed() -> None:
    script = started(buffer=64, messages=100)
    script.receive(Op.DATA, 40)
    script.protocol.inbound.consume(31)
    assert script.posted() == []
    script.protocol.inbound.consume(1)
    targets = script.peer.targets
    assert script.posted() == [
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
    requests = script.posted()
    for _ in range(10):
        script.consume(32)
        requests += script.posted()
    assert [request.target.addr - 0x5000 for request in requests] == [
        number % entries * SEGMENT_SIZE for number in range(1, 12)
    ]
    offsets = [unpack_segment(request.payload, "little").addr - BUFFER for request in requests]
    assert offsets == [32, 0] * 5 + [32]


def test_new_credits_are_sent_after_half_of_the_messages() -> None:
    script = started(buffer=1 << 20, messages=16)
    for number in range(1, 25):
        script.receive(Op.DATA, 1)
        updates = [OutgoingMessage(pack_message(Op.CREDIT, number + 16))] if number % 8 == 0 else []
        assert script.posted() == updates


def test_a_buffer_comes_with_credits() -> None:
    script = started(buffer=64, messages=16)
    script.consume(32, message_size=8)
    assert [unpack_message(request.message) for request in script.posted()] == [(Op.CREDIT, 20)]
    for number in range(1, 9):
        assert script.posted() == []
        script.receive(Op.DATA, 1)
        assert script.protocol.inbound.has_update == (number == 8)


def test_mappings_are_counted_like_data() -> None:
    script = started(buffer=64, messages=16, mappings=2)
    for _ in range(8):
        script.receive(Op.IOMAP, 1)
    assert script.posted() == [OutgoingMessage(pack_message(Op.CREDIT, 24))]


@pytest.mark.parametrize("sends_messages", [False, True])
def test_counters_wrap_around(sends_messages: bool) -> None:
    options = settings(buffer=64, messages=50, sends_messages=sends_messages)
    pair = Pair(options, options).start()
    one, other = pair.sides
    for number in range(70_000):
        assert one.write(bytes([number & 0xFF])) == 1
        one.deliver()
        assert other.read(10) == bytes([number & 0xFF])
        if other.in_flight:
            pair.deliver_all()
    assert len(one.written) > 1 << 16
    # The wrapped counters are exact: a peer that does not read still stops this side.
    while one.write(b"x"):
        pass
    assert len(one.undelivered) <= 50
