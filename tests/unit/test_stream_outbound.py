"""Outbound: targets, credits and mappings of the peer, and the addresses of writes."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.streams import ORDERS, Script, settings, started

from aiordma import ProtocolError
from aiordma.streams import outbound
from aiordma.streams.protocol import OutgoingMessage
from aiordma.streams.wire import (
    MAPPING_SIZE,
    MAX_TRANSFER,
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    Mapping,
    Op,
    Segment,
    pack_mapping,
    pack_message,
    pack_segment,
    unpack_segment,
)


def test_data_fills_a_target_from_its_beginning() -> None:
    protocol = started().protocol
    assert protocol.room == 100
    assert protocol.send(30) == OutgoingMessage(
        pack_message(Op.DATA, 30), b"", Segment(0x6000, 66, 30)
    )
    assert protocol.room == 70
    assert protocol.send(70).target == Segment(0x6000 + 30, 66, 70)
    assert protocol.room == 0


def test_a_message_never_spans_two_targets() -> None:
    script = started()
    script.write_target(1, pack_segment(Segment(0x7000, 77, 50), "little"))
    script.receive(Op.CREDIT, 8)
    rooms = []
    while room := script.protocol.room:
        rooms.append(room)
        script.protocol.send(min(room, 80))
    assert rooms == [100, 20, 50]


def test_targets_are_taken_in_turn() -> None:
    script = started()
    addresses = []
    for number in range(1, 8):
        script.write_target(number % TARGETS, pack_segment(Segment(number, 77, 5), "little"))
        script.receive(Op.CREDIT, number + 8)
        addresses.append(script.protocol.send(script.protocol.room).target.addr)
    assert addresses == [0x6000, 1, 2, 3, 4, 5, 6]


def test_a_target_is_taken_once() -> None:
    script = started()
    script.write_target(1, pack_segment(Segment(0x7000, 77, 5), "little"))
    script.receive(Op.CREDIT, 8)
    assert not any(script.sgl_memory)
    for _ in range(5):
        script.receive(Op.CREDIT, 8)
    assert [script.protocol.send(script.protocol.room).target.length for _ in range(2)] == [100, 5]
    assert script.protocol.room == 0


def test_a_target_in_the_wrong_entry_waits_for_its_turn() -> None:
    script = started()
    script.protocol.send(100)
    script.write_target(0, pack_segment(Segment(0x8000, 88, 5), "little"))
    script.receive(Op.CREDIT, 8)
    assert script.protocol.room == 0
    script.write_target(1, pack_segment(Segment(0x7000, 77, 6), "little"))
    script.receive(Op.CREDIT, 8)
    assert [script.protocol.send(script.protocol.room).target.addr for _ in range(2)] == [
        0x7000,
        0x8000,
    ]


def test_no_more_targets_are_taken_than_the_target_sgl_has() -> None:
    script = started()
    for number in range(10):
        script.write_target(number % TARGETS, pack_segment(Segment(0x7000, 77, 5), "little"))
        script.receive(Op.CREDIT, 50)
    lengths = []
    while room := script.protocol.room:
        lengths.append(script.protocol.send(room).target.length)
    assert lengths == [100, 5]


def test_two_targets_of_one_message_are_both_taken() -> None:
    script = started()
    script.protocol.send(100)
    for entry in 1, 0:
        script.write_target(entry, pack_segment(Segment(entry + 1, 77, 5), "little"))
    script.receive(Op.CREDIT, 8)
    assert [script.protocol.send(5).target.addr for _ in range(2)] == [2, 1]


def test_a_target_written_during_the_read_is_taken_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device writes an entry from its first byte to its last; the length is read first."""
    script, target = started(), Segment(0x7000, 77, 100)
    script.protocol.send(100)

    def read_during_a_write(data: memoryview, order: ByteOrder) -> Segment:
        before = unpack_segment(data, order)
        script.write_target(1, pack_segment(target, order))
        return before._replace(length=unpack_segment(data, order).length)

    monkeypatch.setattr(outbound, "unpack_segment", read_during_a_write)
    script.receive(Op.CREDIT, 8)
    assert script.protocol.send(1).target == Segment(0x7000, 77, 1)


def test_a_target_behind_the_last_address_is_refused() -> None:
    script = started()
    script.write_target(1, pack_segment(Segment((1 << 64) - 1, 77, 2), "little"))
    with pytest.raises(ProtocolError, match="2 bytes at address"):
        script.receive(Op.CREDIT, 8)


def test_a_huge_target_takes_no_more_than_the_largest_transfer() -> None:
    script = Script(settings())
    script.peer = dataclasses.replace(script.peer, buffer=Segment(0, 66, (1 << 32) - 1))
    protocol = script.start().protocol
    assert protocol.room == MAX_TRANSFER
    protocol.send(MAX_TRANSFER)
    assert protocol.send(5).target == Segment(MAX_TRANSFER, 66, 5)


def test_each_message_takes_a_credit() -> None:
    script = started()
    for _ in range(8):
        assert script.protocol.room
        script.protocol.send(1)
    assert script.protocol.room == 0
    script.receive(Op.CREDIT, 10)
    assert script.protocol.outbound.credits == 2
    assert script.protocol.room == 92


@pytest.mark.parametrize(("credits_", "usable"), [(0, 0), (3, 3), (8, 6), (16, 12), (40, 34)])
def test_on_iwarp_credits_are_reserved_for_control_messages(credits_: int, usable: int) -> None:
    script = Script(settings(sends_messages=True))
    script.peer = dataclasses.replace(script.peer, credits=credits_)
    assert script.start().protocol.outbound.credits == usable


# --- mappings ---


def with_mappings(count: int) -> Script:
    script = Script(settings())
    targets = Segment(0x5000, 55, 3)
    script.peer = dataclasses.replace(script.peer, targets=targets, mappings=count)
    return script.start()


@pytest.mark.parametrize("order", ORDERS)
def test_a_mapping_is_written_behind_the_targets(order: ByteOrder) -> None:
    script = with_mappings(4)
    script.peer = dataclasses.replace(script.peer, byte_order=order)
    script.start()
    mapping = Mapping(1 << 40, Segment(0x9000, 99, 50))
    assert script.protocol.announce(2, mapping) == OutgoingMessage(
        pack_message(Op.IOMAP, 2),
        pack_mapping(mapping, order),
        Segment(0x5000 + 3 * SEGMENT_SIZE + 2 * MAPPING_SIZE, 55, MAPPING_SIZE),
    )
    assert script.protocol.outbound.credits == 7


@pytest.mark.parametrize(("count", "index"), [(0, 0), (4, 4), (4, 100)])
def test_a_mapping_beyond_the_peers_iomap_list_is_refused(count: int, index: int) -> None:
    script = with_mappings(count)
    with pytest.raises(ProtocolError, match=f"no entry for mapping {index}"):
        script.protocol.announce(index, Mapping(0, Segment(0, 0, 0)))
    assert script.protocol.outbound.credits == 8


def receive_mapping(script: Script, index: int, mapping: Mapping) -> None:
    start = TARGETS * SEGMENT_SIZE + index * MAPPING_SIZE
    packed = pack_mapping(mapping, script.settings.byte_order)
    script.sgl_memory[start : start + MAPPING_SIZE] = packed
    script.receive(Op.IOMAP, index)


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


def test_a_mapping_can_be_replaced() -> None:
    script = started(mappings=1)
    receive_mapping(script, 0, Mapping(1000, Segment(0x9000, 99, 50)))
    receive_mapping(script, 0, Mapping(0, Segment(0xA000, 88, 60)))
    assert script.protocol.outbound.find_mapped(1000, 1) is None
    assert script.protocol.outbound.mappings == {0: (0, (0xA000, 88, 60))}


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 2), (2, 0xFFFF)])
def test_a_mapping_of_an_unknown_index_is_refused(count: int, index: int) -> None:
    with pytest.raises(ProtocolError, match=f"mapping {index}, which does not exist"):
        started(mappings=count).receive(Op.IOMAP, index)


def test_an_index_has_16_bits() -> None:
    script = started(mappings=2)
    script.receive(Op.IOMAP, 1 << 16 | 1)
    assert list(script.protocol.outbound.mappings) == [1]


def test_a_mapping_behind_the_last_address_is_refused() -> None:
    script = started(mappings=1)
    with pytest.raises(ProtocolError, match="at address"):
        receive_mapping(script, 0, Mapping(0, Segment((1 << 64) - 1, 99, 2)))
    assert script.protocol.outbound.mappings == {}
