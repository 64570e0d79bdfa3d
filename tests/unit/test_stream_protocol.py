"""StreamProtocol: the messages that it posts, and its answers to those of its peer.

The programs of the simulated campaign test what two sides do together. tests/interop tests streams
with the programs of rsocket(7).
"""

from __future__ import annotations

from typing import Any

import pytest
from stream_sides import HALVES, ORDERS, TARGET_SGL, TARGET_SGL_KEY, Script, settings, started

from aiordma import ProtocolError
from aiordma.streams import wire
from aiordma.streams.outbound import MAX_CONTROLS
from aiordma.streams.protocol import (
    RESERVED_RECEIVES,
    OutgoingMessage,
    Settings,
)
from aiordma.streams.states import StreamState
from aiordma.streams.wire import ByteOrder, ConnectionData, Control, Mapping, Op, Segment

SHUTDOWN, DISCONNECT, KEEPALIVE = Control.SHUTDOWN, Control.DISCONNECT, Control.KEEPALIVE
LAST = (1 << 64) - 1


def addresses(targets: list[Segment]) -> list[int]:
    return [target.addr for target in targets]


# --- connecting ---


def test_connection_data_announces_the_target_sgl_and_the_first_half() -> None:
    own = settings(messages=16, byte_order="big", mappings=3)
    data = ConnectionData.unpack(Script(own).protocol.connection_data())
    targets = Segment(TARGET_SGL, TARGET_SGL_KEY, 2)
    assert data == ConnectionData(16, targets, HALVES[0], "big", 3)
    own = settings(messages=16, sends_messages=True)  # receives are reserved for control messages
    data = ConnectionData.unpack(Script(own).protocol.connection_data())
    assert data.credits == 16 - RESERVED_RECEIVES


@pytest.mark.parametrize("order", ORDERS)
def test_the_second_half_is_announced_at_once(order: ByteOrder) -> None:
    assert Script(settings(), byte_order=order).start().posted() == [
        OutgoingMessage(
            wire.pack_message(Op.CREDIT, 16),
            wire.pack_segment(HALVES[1], order),
            Segment(0x5000 + wire.SEGMENT_SIZE, 55, wire.SEGMENT_SIZE),
        )
    ]


def test_before_the_start_messages_are_kept_in_order_and_nothing_is_posted() -> None:
    script = Script(settings())
    script.write_target(1, 0x7000, 77, 100)
    script.receive(Op.DATA, 10)
    script.receive(Op.CREDIT, 9)
    script.receive_control(SHUTDOWN)
    protocol = script.protocol
    assert (protocol.inbound.available, protocol.peer_finished, protocol.room) == (0, False, 0)
    assert protocol.next_control_message() is None
    with pytest.raises(ProtocolError, match="no entry"):
        protocol.announce(0, Mapping(0, Segment(0, 0, 0)))
    script.start()
    assert (protocol.inbound.available, protocol.state) == (10, StreamState.SENDING)
    assert addresses(script.send_all()) == [0x6000, 0x7000]
    script = Script(settings())
    script.receive_control(SHUTDOWN)
    script.receive(Op.DATA, 10)
    with pytest.raises(ProtocolError, match="after SHUTDOWN or DISCONNECT"):
        script.start()


# --- received data, and the credits and buffers for the peer ---


@pytest.mark.parametrize(("buffer", "ring"), [(64, 64), (65, 64)])
def test_bytes_are_readable_up_to_the_end_of_the_ring(buffer: int, ring: int) -> None:
    """The last byte of an odd buffer is not used."""
    script = started(buffer=buffer)
    inbound = script.protocol.inbound
    script.consume(50)
    (update,) = script.posted()
    assert wire.unpack_segment(update.payload, "little") == HALVES[0]
    script.receive(Op.DATA, 14)
    script.receive(Op.DATA, 30)
    assert [inbound.readable(limit) for limit in (5, 100)] == [(50, 5), (50, ring - 50)]
    inbound.consume(14)
    assert (inbound.available, inbound.readable(100)) == (30, (0, 30))
    (update,) = script.posted()
    assert wire.unpack_segment(update.payload, "little") == HALVES[1]


def test_counters_wrap_around() -> None:
    script = Script(settings(buffer=64, messages=50), buffer=Segment(0, 66, 1 << 20)).start()
    limit = 50
    for number in range(1, 70_000):
        script.consume(1)
        for update in script.posted():
            limit = wire.unpack_message(update.message)[1]
        assert 25 < limit - number & 0xFFFF <= 50
        script.protocol.send(1)
        script.receive(Op.CREDIT, number + 8 & 0xFFFF)
        assert script.protocol.outbound.credits == 8


@pytest.mark.parametrize(("unread", "nbytes"), [(0, 65), (0, wire.MAX_TRANSFER), (64, 1)])
def test_more_data_than_was_announced_are_refused(unread: int, nbytes: int) -> None:
    script = started(buffer=64)
    script.receive(Op.DATA, unread)
    assert script.posted() == []
    error = f"{nbytes} bytes written, but had room for {64 - unread}"
    with pytest.raises(ProtocolError, match=error):
        script.receive(Op.DATA, nbytes)


@pytest.mark.parametrize("entries", [2, 3, 5])
def test_a_consumed_half_is_announced_in_the_next_of_the_peers_targets(entries: int) -> None:
    script = Script(settings(buffer=64), targets=Segment(0x5000, 55, entries)).start()
    assert len(script.posted()) == 1
    for number in range(2, 12):
        script.receive(Op.DATA, 32)
        script.protocol.inbound.consume(31)
        assert script.posted() == []
        script.protocol.inbound.consume(1)
        half = wire.pack_segment(HALVES[number % 2], "little")
        target = Segment(0x5000 + number % entries * wire.SEGMENT_SIZE, 55, wire.SEGMENT_SIZE)
        message = wire.pack_message(Op.CREDIT, 15 + number)
        assert script.posted() == [OutgoingMessage(message, half, target)]


@pytest.mark.parametrize(("op", "value"), [(Op.DATA, 1), (Op.IOMAP, 1)])
def test_new_credits_are_sent_after_half_of_the_messages(op: Op, value: int) -> None:
    script = started(buffer=1 << 20, messages=16, mappings=2)
    for number in range(1, 25):
        script.receive(op, value)
        update = OutgoingMessage(wire.pack_message(Op.CREDIT, number + 16))
        assert script.posted() == ([update] if number % 8 == 0 else [])


def test_a_buffer_comes_with_credits() -> None:
    script = started(buffer=64, messages=16)
    script.consume(32, message_size=8)
    (update,) = script.posted()
    assert wire.unpack_message(update.message) == (Op.CREDIT, 20)
    for number in range(1, 9):
        assert script.posted() == []
        script.receive(Op.DATA, 1)
        assert script.protocol.inbound.has_update == (number == 8)


# --- sent data: targets and credits of the peer ---


def test_targets_are_taken_in_turn_and_once() -> None:
    script, found = started(), []
    for number in range(1, 8):
        script.receive_target(number % wire.TARGETS, number, 77, 5, credits_=number + 8)
        script.receive(Op.CREDIT, number + 8)
        assert not any(script.sgl_memory)
        found.append(script.protocol.send(script.protocol.room).target.addr)
    assert found == [0x6000, 1, 2, 3, 4, 5, 6]
    assert addresses(script.send_all()) == [7]
    script = started()
    for number in range(10):  # more than the target SGL has
        script.receive_target(number % wire.TARGETS, 0x7000, 77, 5, credits_=50)
    assert [target.length for target in script.send_all()] == [100, 5]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_target_in_the_wrong_entry_waits_for_its_turn(at_once: bool) -> None:
    script = started()
    script.protocol.send(100)
    script.write_target(0, 0x8000, 88, 5)
    if not at_once:
        script.receive(Op.CREDIT, 8)
        assert script.protocol.room == 0
    script.receive_target(1, 0x7000, 77, 6)
    assert addresses(script.send_all()) == [0x7000, 0x8000]


def test_the_first_buffer_of_the_peer_can_be_huge_or_missing() -> None:
    protocol = Script(settings(), buffer=Segment(0, 66, (1 << 32) - 1)).start().protocol
    assert protocol.room == wire.MAX_TRANSFER
    protocol.send(wire.MAX_TRANSFER)
    assert protocol.send(5).target == Segment(wire.MAX_TRANSFER, 66, 5)
    script = Script(settings(), buffer=Segment(0, 0, 0)).start()
    assert script.protocol.room == 0
    script.receive_target(1, 0x7000, 77, 100)
    assert script.send_all() == [Segment(0x7000, 77, 100)]


def test_a_message_alone_has_no_target_and_a_side_no_mappings() -> None:
    assert OutgoingMessage(5) == (5, b"", Segment(0, 0, 0))
    sgl, buffer = settings().target_sgl, settings().buffer
    assert Settings(16, sgl, buffer, "little", sends_messages=False).mappings == 0


def test_each_message_takes_a_credit() -> None:
    script = started()
    assert len(script.send_all(limit=1)) == 8
    script.receive(Op.CREDIT, 10)
    assert (script.protocol.outbound.credits, script.protocol.room) == (2, 92)


def test_on_iwarp_the_receives_of_a_busy_peer_suffice_for_all_messages() -> None:
    """A message without a receive ends the connection.

    The peer sends all that it may, and then takes no completions. All requests of this side
    complete.
    """
    own = settings(buffer=64, messages=32, sends_messages=True)
    script = Script(own, credits=32).start()
    messages = len(script.send_all(limit=1)) + len(script.posted())
    for nbytes in [1] * 24 + [8, 32]:
        script.consume(nbytes)
        messages += len(script.posted())
    for end in (script.protocol.finish, script.protocol.leave):
        end()
        messages += len(script.posted())
    assert 30 < messages <= 32


@pytest.mark.parametrize(("credits_", "usable"), [(0, 0), (3, 3), (8, 6), (16, 12), (40, 34)])
def test_on_iwarp_credits_are_reserved_for_control_messages(credits_: int, usable: int) -> None:
    script = Script(settings(sends_messages=True), credits=credits_).start()
    assert script.protocol.outbound.credits == usable


# --- mappings and byte orders ---


@pytest.mark.parametrize("order", ORDERS)
def test_a_mapping_is_written_to_the_peers_iomap_list_behind_the_targets(order: ByteOrder) -> None:
    peer: dict[str, Any] = {"targets": Segment(0x5000, 55, 3), "byte_order": order, "mappings": 4}
    protocol = Script(settings(), **peer).start().protocol
    mapping = Mapping(1 << 40, Segment(0x9000, 99, 50))
    assert protocol.announce(2, mapping) == OutgoingMessage(
        wire.pack_message(Op.IOMAP, 2),
        wire.pack_mapping(mapping, order),
        Segment(0x5000 + 3 * wire.SEGMENT_SIZE + 2 * wire.MAPPING_SIZE, 55, wire.MAPPING_SIZE),
    )
    assert protocol.outbound.credits == 7
    for index, other in ((0, Script(settings()).start().protocol), (4, protocol), (100, protocol)):
        credits_before = other.outbound.credits
        with pytest.raises(ProtocolError, match=f"no entry for mapping {index}"):
            other.announce(index, mapping)
        assert other.outbound.credits == credits_before


def receive_mapping(script: Script, index: int, mapping: Mapping) -> None:
    start = wire.TARGETS * wire.SEGMENT_SIZE + index * wire.MAPPING_SIZE
    packed = wire.pack_mapping(mapping, script.settings.byte_order)
    script.sgl_memory[start : start + wire.MAPPING_SIZE] = packed
    script.receive(Op.IOMAP, 1 << 16 | index)  # an index has 16 bits


def test_a_range_is_found_where_one_mapping_covers_it() -> None:
    script = started(mappings=2)
    receive_mapping(script, 1, Mapping(1000, Segment(0x9000, 99, 50)))
    receive_mapping(script, 0, Mapping(2000, Segment(0xA000, 88, 60)))
    find_mapped = script.protocol.outbound.find_mapped
    assert find_mapped(1000, 50) == Segment(0x9000, 99, 50)
    assert find_mapped(1049, 1) == Segment(0x9000 + 49, 99, 1)
    assert find_mapped(2010, 20) == Segment(0xA000 + 10, 88, 20)
    for offset, nbytes in [(999, 1), (999, 2), (1050, 1), (1049, 2), (1000, 51), (0, 0)]:
        assert find_mapped(offset, nbytes) is None
    receive_mapping(script, 1, Mapping(0, Segment(0xB000, 77, 60)))  # a replacement
    assert find_mapped(1000, 1) is None
    assert find_mapped(0, 60) == Segment(0xB000, 77, 60)


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 2), (2, 0xFFFF)])
def test_a_mapping_of_an_unknown_index_is_refused(count: int, index: int) -> None:
    with pytest.raises(ProtocolError, match=f"mapping {index}, which does not exist"):
        started(mappings=count).receive(Op.IOMAP, index)


def test_a_target_or_mapping_behind_the_last_address_is_refused() -> None:
    script = started(mappings=1)
    with pytest.raises(ProtocolError, match="at address"):
        receive_mapping(script, 0, Mapping(0, Segment(LAST, 99, 2)))
    assert script.protocol.outbound.mappings == {}
    with pytest.raises(ProtocolError, match="2 bytes at address"):
        script.receive_target(1, LAST, 77, 2)


@pytest.mark.parametrize(("mappings", "granted", "allowed"), [(3, 16, 3), (128, 16, 4), (0, 16, 0)])
def test_mappings_leave_the_peer_credits(mappings: int, granted: int, allowed: int) -> None:
    """rsocket never returns the credit that an announcement uses."""
    script = Script(settings(), credits=granted, mappings=mappings)
    assert script.protocol.peer_mappings == 0
    assert script.start().protocol.peer_mappings == allowed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sends_messages", [False, True])
def test_a_send_has_the_byte_order_of_its_sender(order: ByteOrder, sends_messages: bool) -> None:
    """Immediate data is not swapped."""
    other: ByteOrder = "little" if order == "big" else "big"
    script = Script(settings(byte_order=order, sends_messages=sends_messages), byte_order=other)

    def receive(op: Op, value: int) -> None:
        message = wire.pack_message(op, value)
        swapped = int.from_bytes(message.to_bytes(4, "big"), "little")
        script.protocol.received(swapped if sends_messages else message)

    receive(Op.DATA, 3)
    script.start()
    (update,) = script.posted()
    reserved = RESERVED_RECEIVES if sends_messages else 0
    assert wire.unpack_message(update.message) == (Op.CREDIT, 1 + 16 - reserved)
    assert wire.unpack_segment(update.payload, other) == HALVES[1]
    receive(Op.DATA, 4)
    assert script.protocol.inbound.available == 7
    assert wire.unpack_message(script.protocol.send(100).message) == (Op.DATA, 100)
    script.write_target(1, 0x7000, 77, 9)
    receive(Op.CREDIT, 20)
    assert script.send_all() == [Segment(0x7000, 77, 9)]


# --- control messages and the end ---


def test_posted_control_messages_are_bounded_and_their_completions_counted() -> None:
    script = Script(settings(buffer=1 << 20)).start()
    protocol = script.protocol
    for _ in range(MAX_CONTROLS):
        assert protocol.next_control_message() is not None
        for _ in range(8):
            script.receive(Op.DATA, 1)
    assert protocol.inbound.has_update
    assert protocol.next_control_message() is None
    protocol.control_completed()
    update = OutgoingMessage(wire.pack_message(Op.CREDIT, 8 * MAX_CONTROLS + 16))
    assert protocol.next_control_message() == update
    assert protocol.next_control_message() is None
    protocol, completed, ops = Script(settings()).start().protocol, [], []
    protocol.finish()
    while message := protocol.next_control_message():
        ops.append(wire.unpack_message(message.message)[0])
    for _ in ops:
        completed.append(protocol.all_controls_completed)
        protocol.control_completed()
    assert (completed, protocol.all_controls_completed) == ([False, False], True)
    assert ops == [Op.CREDIT, Op.CONTROL]  # credit updates come first


def test_a_finished_side_still_receives_and_sends_credits() -> None:
    script = started()
    script.protocol.finish()
    assert script.posted_controls() == [SHUTDOWN]
    assert (script.protocol.state, script.protocol.room) == (StreamState.RECEIVING, 0)
    script.consume(32)
    assert len(script.posted()) == 1
    script.protocol.finish()
    assert script.posted_controls() == []


def test_keepalives_are_ignored_and_a_finished_peer_gets_no_credits() -> None:
    script = started()
    for _ in range(100):
        script.receive_control(KEEPALIVE)
    assert (script.posted(), script.protocol.state) == ([], StreamState.OPEN)
    script.receive(Op.DATA, 32)
    script.receive_control(SHUTDOWN)
    protocol = script.protocol
    protocol.inbound.consume(32)
    assert script.posted() == []
    assert (protocol.state, protocol.room) == (StreamState.SENDING, 100)
    assert (protocol.peer_finished, protocol.peer_left) == (True, False)
    protocol.finish()
    assert (script.posted_controls(), protocol.state) == ([DISCONNECT], StreamState.ENDED)


@pytest.mark.parametrize("control", [SHUTDOWN, DISCONNECT])
def test_bytes_before_the_end_can_be_read_and_later_ones_are_refused(
    control: Control,
) -> None:
    script = started()
    script.receive(Op.DATA, 20)
    script.receive_control(control)
    assert script.protocol.inbound.readable(100) == (0, 20)
    with pytest.raises(ProtocolError, match="after SHUTDOWN or DISCONNECT"):
        script.receive(Op.DATA, 1)


def test_a_side_that_left_takes_no_data_and_gets_no_messages() -> None:
    script = started()
    script.protocol.leave()
    assert (script.posted_controls(), script.protocol.has_left) == ([DISCONNECT], True)
    for _ in range(100):
        script.receive(Op.DATA, 60)
    script.protocol.leave()
    assert (script.protocol.inbound.available, script.posted()) == (0, [])
    script = started()  # here the peer leaves
    script.receive_control(DISCONNECT)
    protocol = script.protocol
    assert (protocol.room, protocol.peer_left, protocol.peer_finished) == (0, True, True)
    protocol.finish()
    protocol.leave()
    assert (script.posted_controls(), protocol.state) == ([], StreamState.ENDED)


def test_a_lost_connection_drops_control_messages() -> None:
    script = started()
    script.protocol.finish()
    for end in (script.protocol.connection_lost, script.protocol.leave):
        end()
        assert script.posted_controls() == []
        assert (script.protocol.state, script.protocol.room) == (StreamState.BROKEN, 0)


OTHER_OPS = sorted(set(range(8)) - set(Op))


@pytest.mark.parametrize(
    ("message", "error"),
    [(op << 29 | 5, f"{op << 29 | 5:#010x}") for op in OTHER_OPS]
    + [(Op.CONTROL << 29 | n, f"control message {n}") for n in (3, 4, wire.MAX_TRANSFER)],
)
def test_other_messages_are_refused(message: int, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        started().protocol.received(message)
