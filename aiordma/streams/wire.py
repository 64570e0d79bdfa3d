"""What rsocket's protocol, version 1, puts on the wire: rdma-core's librdmacm/docs/rsocket.

Each side shows the other two pieces of its memory in the private data of connecting: a first
receive buffer, and a list of targets into which the other side writes where further buffers are.
Everything after that is a number of 32 bits, a message, beside or behind an RDMA write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from aiordma.errors import ProtocolError

ByteOrder = Literal["little", "big"]
"""As sys.byteorder says it."""

VERSION = 1
# A peer may write into so many targets before the first of them must have been used up.
TARGETS = 2
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
    """What a message is about: its upper 3 bits. The others are reserved."""

    DATA = 0
    """So many bytes were written into the receive buffer."""
    CREDIT = 4
    """So many messages of data may have been sent; and a target may have changed."""
    IOMAP = 6
    """A mapping was written, at this index."""
    CONTROL = 7


class Control(IntEnum):
    """What a control message says: its lower 29 bits."""

    DISCONNECT = 0
    """No data will be sent any more, and none received."""
    KEEPALIVE = 1
    SHUTDOWN = 2
    """No data will be sent any more."""


def pack_message(op: Op, value: int) -> int:
    """The number that says it; of `value` the lower 29 bits count."""
    return op << 29 | value & MAX_TRANSFER


def unpack_message(message: int) -> tuple[int, int]:
    """Its upper 3 bits, which may be no Op, and its lower 29."""
    return message >> 29, message & MAX_TRANSFER


class Segment(NamedTuple):
    """A piece of somebody's memory, and the key to it."""

    addr: int
    key: int
    length: int

    def after(self, nbytes: int) -> Segment:
        """What is left of it behind so many bytes."""
        return Segment(self.addr + nbytes, self.key, self.length - nbytes)

    def check(self) -> None:
        """Make sure that it is one.

        Raises:
            ProtocolError: it ends behind the last address.
        """
        if self.addr + self.length > _ADDRESSES:
            raise ProtocolError(f"the peer shows {self.length} bytes at address {self.addr:#x}")


def pack_segment(segment: Segment, order: ByteOrder) -> bytes:
    """As it stands in a list of targets of a machine with this byte order."""
    return _SEGMENT[order].pack(*segment)


def unpack_segment(data: bytes | memoryview, order: ByteOrder) -> Segment:
    """Undo pack_segment()."""
    return Segment(*_SEGMENT[order].unpack(data))


class Mapping(NamedTuple):
    """An application's buffer that the other side may write to at an offset of its choice."""

    offset: int
    segment: Segment


def pack_mapping(mapping: Mapping, order: ByteOrder) -> bytes:
    """As it stands in a list of mappings of a machine with this byte order."""
    return _MAPPING[order].pack(mapping.offset, *mapping.segment)


def unpack_mapping(data: bytes | memoryview, order: ByteOrder) -> Mapping:
    """Undo pack_mapping()."""
    offset, *segment = _MAPPING[order].unpack(data)
    return Mapping(offset, Segment(*segment))


@dataclass(frozen=True, slots=True)
class ConnectionData:
    """What the sides tell each other in the private data of connecting."""

    credits: int
    """Messages of data that the other may send to begin with."""
    targets: Segment
    """Where the other announces further receive buffers; the length counts entries, not bytes."""
    buffer: Segment
    """The first receive buffer."""
    byte_order: ByteOrder
    """In which the sender of this has its targets, its mappings, and on iWARP its messages."""
    mappings: int = 0
    """How many mappings the other may announce, behind the targets."""

    def pack(self) -> bytes:
        """The private data."""
        flags = _HAS_IOMAP | (_PEER_IS_BIG_ENDIAN if self.byte_order == "big" else 0)
        size = _to_scale(self.mappings)
        return _CONNECTION_DATA.pack(
            VERSION, flags, self.credits, size, *self.targets, *self.buffer
        )

    @classmethod
    def unpack(cls, data: bytes) -> ConnectionData:
        """Read it from private data, which may be longer: transports pad it.

        Raises:
            ProtocolError: it is not rsocket's, or of a version other than 1, or makes no sense.
        """
        if len(data) < CONNECTION_DATA_SIZE:
            raise ProtocolError(
                f"the peer speaks no rsocket: it sent {len(data)} bytes of private data, rsocket "
                f"has {CONNECTION_DATA_SIZE}"
            )
        version, flags, its_credits, scale, *segments = _CONNECTION_DATA.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(
                f"the peer speaks no rsocket, or version {version} of it: this is version {VERSION}"
            )
        targets, buffer = Segment(*segments[:3]), Segment(*segments[3:])
        mappings = _from_scale(scale) if flags & _HAS_IOMAP else 0
        if targets.length < TARGETS:
            raise ProtocolError(
                f"the peer has a list of {targets.length} targets: rsocket needs {TARGETS}"
            )
        targets._replace(length=targets.length * SEGMENT_SIZE + mappings * MAPPING_SIZE).check()
        buffer.check()
        order: ByteOrder = "big" if flags & _PEER_IS_BIG_ENDIAN else "little"
        return cls(its_credits, targets, buffer, order, mappings)


# A size is carried in 8 bits: as it is up to 128, in steps of 256 above.
def _to_scale(value: int) -> int:
    return value if value <= 128 else 128 | value >> 8


def _from_scale(scale: int) -> int:
    return scale if scale <= 128 else (scale & 127) << 8
