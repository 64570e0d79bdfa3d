"""The wire format of the rsocket protocol, version 1: librdmacm/docs/rsocket in rdma-core.

When the sides connect, each announces two pieces of its memory in the private data. One is its
first receive buffer. The other is its target SGL: the list of targets to which the other side
writes the addresses of further buffers. After that each message is a number of 32 bits. It travels
with an RDMA WRITE as its immediate data, or behind it as a send.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from aiordma._native import fast_path
from aiordma.errors import ProtocolError

ByteOrder = Literal["little", "big"]
"""A byte order, in the form of sys.byteorder."""

VERSION = 1
# The number of entries of the target SGL: the peer can announce this many targets before the first
# of them is used up.
TARGETS = fast_path.STREAM_TARGETS
MAX_CREDITS = 0xFFFE
MAX_TRANSFER = (1 << 29) - 1

_PEER_IS_BIG_ENDIAN = 1
_HAS_IOMAP = 2

# version, flags, credits, reserved, iomap_size; then two segments: address, key, length.
_CONNECTION_DATA = struct.Struct(">BBH3xB QII QII")
CONNECTION_DATA_SIZE = _CONNECTION_DATA.size
_SEGMENT = {"little": struct.Struct("<QII"), "big": struct.Struct(">QII")}
SEGMENT_SIZE = 16
_MAPPING = {"little": struct.Struct("<QQII"), "big": struct.Struct(">QQII")}
MAPPING_SIZE = 24

_ADDRESSES = 1 << 64


class Op(IntEnum):
    """The kind of a message: its upper 3 bits. Other values are reserved."""

    DATA = 0
    """The value is the number of bytes that were written to the receive buffer."""
    CREDIT = 4
    """The value is the total number of messages that may have been sent. The target SGL can have
    changed. This is RS_OP_SGL in rsocket."""
    IOMAP = 6
    """A mapping was written. The value is its index in the iomap list."""
    CONTROL = 7
    """The value is a Control."""


class Control(IntEnum):
    """The value of a control message: its lower 29 bits."""

    DISCONNECT = 0
    """The sender of the message neither sends nor receives data any more."""
    KEEPALIVE = 1
    """The sender of the message checks the connection."""
    SHUTDOWN = 2
    """The sender of the message sends no data any more."""


def pack_message(op: Op, value: int) -> int:
    """Return the message for `op` and the lower 29 bits of `value`."""
    return op << 29 | value & MAX_TRANSFER


def unpack_message(message: int) -> tuple[int, int]:
    """Return the upper 3 bits of a message, which need not be an Op, and the lower 29 bits."""
    return message >> 29, message & MAX_TRANSFER


class Segment(NamedTuple):
    """A piece of registered memory: its address, remote key and length."""

    addr: int
    key: int
    length: int

    def after(self, nbytes: int) -> Segment:
        """Return the rest of the segment behind its first `nbytes`."""
        return Segment(self.addr + nbytes, self.key, self.length - nbytes)

    def check(self) -> None:
        """Check that the segment lies within the address space.

        Raises:
            ProtocolError: the segment ends behind the last address.
        """
        if self.addr + self.length > _ADDRESSES:
            raise ProtocolError(
                f"the peer announced {self.length} bytes at address {self.addr:#x}, "
                "beyond the last address"
            )


def pack_segment(segment: Segment, order: ByteOrder) -> bytes:
    """Return the entry of the target SGL of a machine with this byte order."""
    return _SEGMENT[order].pack(*segment)


def unpack_segment(data: bytes | memoryview, order: ByteOrder) -> Segment:
    """Return the segment that pack_segment() packed."""
    return Segment(*_SEGMENT[order].unpack(data))


# An offset in a mapping has 64 bits.
MAX_OFFSET = (1 << 64) - 1


class Mapping(NamedTuple):
    """A buffer of an application that the other side may write to, by an offset (iomap)."""

    offset: int
    segment: Segment


def pack_mapping(mapping: Mapping, order: ByteOrder) -> bytes:
    """Return the entry of the iomap list of a machine with this byte order."""
    return _MAPPING[order].pack(mapping.offset, *mapping.segment)


def unpack_mapping(data: bytes | memoryview, order: ByteOrder) -> Mapping:
    """Return the mapping that pack_mapping() packed."""
    offset, *segment = _MAPPING[order].unpack(data)
    return Mapping(offset, Segment(*segment))


@dataclass(frozen=True, slots=True)
class ConnectionData:
    """The private data that each side sends when the sides connect."""

    credits: int
    """The number of messages that the other side may send at first."""
    targets: Segment
    """The target SGL: the other side announces further receive buffers there. The length counts
    entries, not bytes."""
    buffer: Segment
    """The first receive buffer."""
    byte_order: ByteOrder
    """The byte order of the sender's machine: of its target SGL, its iomap list, and on iWARP its
    messages."""
    mappings: int = 0
    """The number of mappings that the other side may announce. They lie behind the targets."""

    def pack(self) -> bytes:
        """Return the private data."""
        flags = _HAS_IOMAP | (_PEER_IS_BIG_ENDIAN if self.byte_order == "big" else 0)
        size = _to_scale(self.mappings)
        return _CONNECTION_DATA.pack(
            VERSION, flags, self.credits, size, *self.targets, *self.buffer
        )

    @classmethod
    def unpack(cls, data: bytes) -> ConnectionData:
        """Read the connection data from private data, which can be longer: transports pad it.

        Raises:
            ProtocolError: the private data is not that of rsocket version 1, or is not valid.
        """
        if len(data) < CONNECTION_DATA_SIZE:
            raise ProtocolError(
                f"this is no rsocket peer: it sent {len(data)} bytes of private data, "
                f"rsocket sends {CONNECTION_DATA_SIZE}"
            )
        version, flags, peer_credits, scale, *segments = _CONNECTION_DATA.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(
                f"this is no rsocket peer of version {VERSION}: "
                f"its private data has version {version}"
            )
        targets, buffer = Segment(*segments[:3]), Segment(*segments[3:])
        mappings = _from_scale(scale) if flags & _HAS_IOMAP else 0
        if targets.length < TARGETS:
            raise ProtocolError(
                f"the target SGL of the peer has {targets.length} targets: rsocket needs {TARGETS}"
            )
        targets._replace(length=targets.length * SEGMENT_SIZE + mappings * MAPPING_SIZE).check()
        buffer.check()
        order: ByteOrder = "big" if flags & _PEER_IS_BIG_ENDIAN else "little"
        return cls(peer_credits, targets, buffer, order, mappings)


# A size is encoded in 8 bits: unchanged up to 128, in steps of 256 above.
def _to_scale(value: int) -> int:
    return value if value <= 128 else 128 | value >> 8


def _from_scale(scale: int) -> int:
    return scale if scale <= 128 else (scale & 127) << 8
