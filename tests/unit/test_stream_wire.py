"""The wire format of rsocket: connection data, messages, segments and mappings, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma import ProtocolError
from aiordma.streams.wire import (
    CONNECTION_DATA_SIZE,
    MAPPING_SIZE,
    MAX_TRANSFER,
    SEGMENT_SIZE,
    ByteOrder,
    ConnectionData,
    Control,
    Mapping,
    Op,
    Segment,
    pack_mapping,
    pack_message,
    pack_segment,
    unpack_mapping,
    unpack_message,
    unpack_segment,
)

ORDERS: list[ByteOrder] = ["little", "big"]
FAST = how(max_examples=100, deadline=None, derandomize=True)

TARGETS = Segment(0x00007F1122334455, 0xA1B2C3D4, 2)
BUFFER = Segment(0x00007FAABBCCDDEE, 0x01020304, 0x10000)

# struct rs_conn_data: version, flags, credits, 3 reserved, target_iomap_size;
# target_sgl and data_buf: addr, key, length. All of it in network byte order.
VECTOR = bytes.fromhex(
    "01 02 0180 000000 0000007f1122334455 a1b2c3d4 0000000200007faabbccddee 01020304 00010000"
)
FLAGS, CREDITS, RESERVED, IOMAP_SIZE, TARGETS_AT, BUFFER_AT = 1, 2, 4, 7, 8, 24


def changed(at: int, new: str) -> bytes:
    """Return the vector with other bytes at offset `at`."""
    data = bytes.fromhex(new)
    return VECTOR[:at] + data + VECTOR[at + len(data) :]


# --- connection data ---


def test_connection_data_has_the_format_of_rsocket() -> None:
    data = ConnectionData(384, TARGETS, BUFFER, "little")
    assert data.pack() == VECTOR
    assert ConnectionData.unpack(VECTOR) == data
    assert len(VECTOR) == CONNECTION_DATA_SIZE == 40


def test_the_other_byte_order_changes_only_a_flag() -> None:
    data = ConnectionData(384, TARGETS, BUFFER, "big")
    assert data.pack() == changed(FLAGS, "03")
    assert ConnectionData.unpack(changed(FLAGS, "03")) == data


@pytest.mark.parametrize(
    ("mappings", "encoded", "decoded"),
    [
        (0, "00", 0),
        (1, "01", 1),
        (127, "7f", 127),
        (128, "80", 128),
        (129, "80", 128),
        (255, "80", 128),
        (256, "81", 256),
        (300, "81", 256),
        (512, "82", 512),
        (32512, "ff", 32512),
    ],
)
def test_more_than_128_mappings_are_encoded_in_steps(
    mappings: int, encoded: str, decoded: int
) -> None:
    data = ConnectionData(384, TARGETS, BUFFER, "little", mappings)
    assert data.pack() == changed(IOMAP_SIZE, encoded)
    assert ConnectionData.unpack(data.pack()).mappings == decoded


def test_connection_data_without_the_iomap_flag_has_no_mappings() -> None:
    assert ConnectionData.unpack(changed(FLAGS, "00 0180 000000 05")).mappings == 0


def test_unknown_flags_and_reserved_bytes_are_ignored() -> None:
    expected = ConnectionData.unpack(VECTOR)
    assert ConnectionData.unpack(changed(FLAGS, "fe")) == expected
    assert ConnectionData.unpack(changed(RESERVED, "ffffff")) == expected


@pytest.mark.parametrize("size", [41, 56, 196, 255])
@pytest.mark.parametrize("filling", [b"\0", b"\xff"])
def test_padding_of_the_transport_is_ignored(size: int, filling: bytes) -> None:
    padded = VECTOR + filling * (size - len(VECTOR))
    assert ConnectionData.unpack(padded) == ConnectionData.unpack(VECTOR)


@pytest.mark.parametrize("credits_", [0, 1, 0xFFFE, 0xFFFF])
def test_credits_are_16_bits(credits_: int) -> None:
    packed = ConnectionData(credits_, TARGETS, BUFFER, "little").pack()
    assert packed == changed(CREDITS, f"{credits_:04x}")
    assert ConnectionData.unpack(packed).credits == credits_


LAST = "ffffffffffffffff"
MALFORMED = {
    "nothing": (b"", "0 bytes"),
    "too short": (VECTOR[:-1], "39 bytes"),
    "only padding": (bytes(56), "version 0"),
    "version 0": (changed(0, "00"), "version 0"),
    "version 2": (changed(0, "02"), "version 2"),
    "no targets": (changed(TARGETS_AT + 12, "00000000"), "0 targets"),
    "one target": (changed(TARGETS_AT + 12, "00000001"), "1 targets"),
    "targets behind the last address": (changed(TARGETS_AT, "ffffffffffffffe1"), "address"),
    "the largest number of targets": (
        changed(TARGETS_AT, "fffffff000000011 00000000 ffffffff"),
        "address",
    ),
    "mappings behind the last address": (
        changed(IOMAP_SIZE, "01 ffffffffffffffc9"),
        "address",
    ),
    "a buffer behind the last address": (changed(BUFFER_AT, "ffffffffffff0001"), "address"),
    "a buffer at the last address": (changed(BUFFER_AT, LAST), "address"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_connection_data_is_refused(name: str) -> None:
    data, message_part = MALFORMED[name]
    with pytest.raises(ProtocolError, match=message_part):
        ConnectionData.unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        changed(TARGETS_AT, "ffffffffffffffe0"),
        changed(IOMAP_SIZE, "01 ffffffffffffffc8"),
        changed(BUFFER_AT, "ffffffffffff0000"),
        changed(BUFFER_AT, f"{LAST} 00000000 00000000"),
        changed(TARGETS_AT + 12, "00000003"),
        changed(BUFFER_AT + 12, "ffffffff"),
    ],
)
def test_the_largest_valid_values_are_accepted(data: bytes) -> None:
    assert ConnectionData.unpack(data).pack() == data


def test_shorter_connection_data_is_refused() -> None:
    for size in range(CONNECTION_DATA_SIZE):
        with pytest.raises(ProtocolError, match=f"{size} bytes"):
            ConnectionData.unpack(VECTOR[:size])


ADDRESSES = st.integers(0, (1 << 63) - 1)
NUMBERS = st.integers(0, (1 << 32) - 1)
SEGMENTS = st.builds(Segment, ADDRESSES, NUMBERS, NUMBERS)
LISTS = st.builds(Segment, ADDRESSES, NUMBERS, st.integers(2, (1 << 32) - 1))
SIZES = st.one_of(st.integers(0, 128), st.integers(1, 127).map(lambda size: size << 8))


@FAST
@given(
    st.builds(
        ConnectionData, st.integers(0, 0xFFFF), LISTS, SEGMENTS, st.sampled_from(ORDERS), SIZES
    ),
    st.binary(max_size=200),
)
def test_connection_data_survives_packing(data: ConnectionData, padding: bytes) -> None:
    assert ConnectionData.unpack(data.pack() + padding) == data


@FAST
@given(
    st.one_of(
        st.binary(max_size=100),
        st.binary(min_size=39, max_size=60).map(lambda data: b"\x01" + data),
    )
)
def test_random_bytes_are_unpacked_or_refused(data: bytes) -> None:
    try:
        read = ConnectionData.unpack(data)
    except ProtocolError:
        return
    assert ConnectionData.unpack(read.pack()) == read


# --- messages ---


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        (Op.DATA, 0, 0x00000000),
        (Op.DATA, 65536, 0x00010000),
        (Op.DATA, MAX_TRANSFER, 0x1FFFFFFF),
        (Op.CREDIT, 384, 0x80000180),
        (Op.CREDIT, 65535 + 65534, 0x8001FFFD),
        (Op.IOMAP, 7, 0xC0000007),
        (Op.CONTROL, Control.DISCONNECT, 0xE0000000),
        (Op.CONTROL, Control.KEEPALIVE, 0xE0000001),
        (Op.CONTROL, Control.SHUTDOWN, 0xE0000002),
    ],
)
def test_messages_have_the_format_of_rsocket(op: Op, value: int, message: int) -> None:
    assert pack_message(op, value) == message
    assert unpack_message(message) == (op, value)


def test_a_value_of_more_bits_does_not_change_the_op() -> None:
    assert pack_message(Op.CREDIT, (1 << 29) + 5) == pack_message(Op.CREDIT, 5)


@FAST
@given(NUMBERS)
def test_every_message_is_unpacked(message: int) -> None:
    op, value = unpack_message(message)
    assert (0 <= op < 8, 0 <= value <= MAX_TRANSFER) == (True, True)
    if op in set(Op):
        assert pack_message(Op(op), value) == message


# --- segments and mappings ---


PACKED: dict[ByteOrder, tuple[str, str]] = {
    "little": ("eeddccbbaa7f0000 04030201 00000100", "efcdab8967452301"),
    "big": ("00007faabbccddee 01020304 00010000", "0123456789abcdef"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_segment_has_the_byte_order_of_its_reader(order: ByteOrder) -> None:
    data = bytes.fromhex(PACKED[order][0])
    assert pack_segment(BUFFER, order) == data
    assert unpack_segment(data, order) == BUFFER
    assert unpack_segment(memoryview(data), order) == BUFFER
    assert len(data) == SEGMENT_SIZE


@pytest.mark.parametrize("order", ORDERS)
def test_a_mapping_is_an_offset_and_a_segment(order: ByteOrder) -> None:
    segment, offset = map(bytes.fromhex, PACKED[order])
    mapping = Mapping(0x0123456789ABCDEF, BUFFER)
    assert pack_mapping(mapping, order) == offset + segment
    assert unpack_mapping(offset + segment, order) == mapping
    assert unpack_mapping(memoryview(offset + segment), order) == mapping
    assert len(offset + segment) == MAPPING_SIZE


@FAST
@given(SEGMENTS, st.integers(0, (1 << 64) - 1), st.sampled_from(ORDERS))
def test_segments_and_mappings_survive_packing(
    segment: Segment, offset: int, order: ByteOrder
) -> None:
    mapping = Mapping(offset, segment)
    assert unpack_segment(pack_segment(segment, order), order) == segment
    assert unpack_mapping(pack_mapping(mapping, order), order) == mapping


@pytest.mark.parametrize("addr", [0, 1 << 63, (1 << 64) - 100])
def test_a_segment_up_to_the_last_address_is_valid(addr: int) -> None:
    Segment(addr, 1, 100).check()
    Segment((1 << 64) - 1, 1, 0).check()


def test_a_segment_beyond_the_last_address_is_refused() -> None:
    with pytest.raises(ProtocolError, match="100 bytes at address 0xffffffffffffff9d"):
        Segment((1 << 64) - 99, 1, 100).check()
