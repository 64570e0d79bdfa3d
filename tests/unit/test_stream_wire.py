"""The wire format of rsocket: connection data, messages, segments and mappings, byte by byte."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from stream_sides import ORDERS

from aiordma import ProtocolError
from aiordma.streams import wire
from aiordma.streams.wire import ByteOrder, ConnectionData, Control, Mapping, Op, Segment

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


@pytest.mark.parametrize(
    ("data", "packed"),
    [
        (ConnectionData(384, TARGETS, BUFFER, "little"), VECTOR),
        (ConnectionData(384, TARGETS, BUFFER, "big"), changed(FLAGS, "03")),
        (ConnectionData(0, TARGETS, BUFFER, "little"), changed(CREDITS, "0000")),
        (ConnectionData(0xFFFF, TARGETS, BUFFER, "little"), changed(CREDITS, "ffff")),
    ],
)
def test_connection_data_has_the_format_of_rsocket(data: ConnectionData, packed: bytes) -> None:
    assert data.pack() == packed
    assert ConnectionData.unpack(packed) == data
    assert len(packed) == wire.CONNECTION_DATA_SIZE == 40


@pytest.mark.parametrize(
    ("mappings", "encoded", "decoded"),
    [
        (0, "00", 0), (1, "01", 1), (127, "7f", 127), (128, "80", 128), (129, "80", 128),
        (255, "80", 128), (256, "81", 256), (300, "81", 256), (512, "82", 512),
        (32512, "ff", 32512),
    ],
)  # fmt: skip
def test_over_128_mappings_are_encoded_in_steps(mappings: int, encoded: str, decoded: int) -> None:
    data = ConnectionData(384, TARGETS, BUFFER, "little", mappings)
    assert data.pack() == changed(IOMAP_SIZE, encoded)
    assert ConnectionData.unpack(data.pack()).mappings == decoded


@pytest.mark.parametrize(
    "data",
    [
        changed(FLAGS, "00 0180 000000 05"),  # mappings without their flag
        changed(FLAGS, "fe"),
        changed(RESERVED, "ffffff"),
        *(VECTOR + filling * size for filling in (b"\0", b"\xff") for size in (1, 16, 156, 215)),
    ],
)
def test_unknown_flags_reserved_bytes_and_padding_are_ignored(data: bytes) -> None:
    assert ConnectionData.unpack(data) == ConnectionData.unpack(VECTOR)


LAST = "ffffffffffffffff"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        *((VECTOR[:size], f"{size} bytes") for size in range(wire.CONNECTION_DATA_SIZE)),
        (bytes(56), "version 0"),
        (changed(0, "00"), "version 0"),
        (changed(0, "02"), "version 2"),
        (changed(TARGETS_AT + 12, "00000000"), "0 targets"),
        (changed(TARGETS_AT + 12, "00000001"), "1 targets"),
        (changed(TARGETS_AT, "ffffffffffffffe1"), "address"),
        (changed(TARGETS_AT, "fffffff000000011 00000000 ffffffff"), "address"),
        (changed(IOMAP_SIZE, "01 ffffffffffffffc9"), "address"),  # the mappings behind the targets
        (changed(BUFFER_AT, "ffffffffffff0001"), "address"),
        (changed(BUFFER_AT, LAST), "address"),
    ],
)
def test_malformed_connection_data_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
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


ADDRESSES = st.integers(0, (1 << 63) - 1)
NUMBERS = st.integers(0, (1 << 32) - 1)
SEGMENTS = st.builds(Segment, ADDRESSES, NUMBERS, NUMBERS)
LISTS = st.builds(Segment, ADDRESSES, NUMBERS, st.integers(2, (1 << 32) - 1))
SIZES = st.one_of(st.integers(0, 128), st.integers(1, 127).map(lambda size: size << 8))
CREDIT_NUMBERS, SOME_ORDER = st.integers(0, 0xFFFF), st.sampled_from(ORDERS)


@FAST
@given(
    st.builds(ConnectionData, CREDIT_NUMBERS, LISTS, SEGMENTS, SOME_ORDER, SIZES),
    st.binary(max_size=200),
)
def test_connection_data_survives_packing(data: ConnectionData, padding: bytes) -> None:
    assert ConnectionData.unpack(data.pack() + padding) == data


@FAST
@given(st.sampled_from([b"", b"\x01"]), st.binary(max_size=100))
def test_random_bytes_are_unpacked_or_refused(version: bytes, data: bytes) -> None:
    with suppress(ProtocolError):
        read = ConnectionData.unpack(version + data)
        assert ConnectionData.unpack(read.pack()) == read


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        (Op.DATA, 0, 0x00000000),
        (Op.DATA, 65536, 0x00010000),
        (Op.DATA, wire.MAX_TRANSFER, 0x1FFFFFFF),
        (Op.CREDIT, 384, 0x80000180),
        (Op.CREDIT, 65535 + 65534, 0x8001FFFD),
        (Op.IOMAP, 7, 0xC0000007),
        (Op.CONTROL, Control.DISCONNECT, 0xE0000000),
        (Op.CONTROL, Control.KEEPALIVE, 0xE0000001),
        (Op.CONTROL, Control.SHUTDOWN, 0xE0000002),
    ],
)
def test_messages_have_the_format_of_rsocket(op: Op, value: int, message: int) -> None:
    assert wire.pack_message(op, value) == wire.pack_message(op, (1 << 29) + value) == message
    assert wire.unpack_message(message) == (op, value)


@pytest.mark.parametrize(
    ("order", "segment", "offset"),
    [
        ("little", "eeddccbbaa7f0000 04030201 00000100", "efcdab8967452301"),
        ("big", "00007faabbccddee 01020304 00010000", "0123456789abcdef"),
    ],
)
def test_segments_and_mappings_have_the_byte_order_of_their_reader(
    order: ByteOrder, segment: str, offset: str
) -> None:
    data, mapping = bytes.fromhex(segment), Mapping(0x0123456789ABCDEF, BUFFER)
    assert wire.pack_segment(BUFFER, order) == data
    for view in (data, memoryview(data)):
        assert wire.unpack_segment(view, order) == BUFFER
    whole = bytes.fromhex(offset) + data
    assert wire.pack_mapping(mapping, order) == whole
    for view in (whole, memoryview(whole)):
        assert wire.unpack_mapping(view, order) == mapping
    assert (len(data), len(whole)) == (wire.SEGMENT_SIZE, wire.MAPPING_SIZE)


def test_a_segment_up_to_the_last_address_is_valid() -> None:
    for addr, length in ((0, 100), (1 << 63, 100), ((1 << 64) - 100, 100), ((1 << 64) - 1, 0)):
        Segment(addr, 1, length).check()
    with pytest.raises(ProtocolError, match="100 bytes at address 0xffffffffffffff9d"):
        Segment((1 << 64) - 99, 1, 100).check()
