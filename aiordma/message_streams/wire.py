"""The wire format of message streams, version 1: docs/message_wire.md. All numbers are big-endian.

When the sides connect, each sends a Hello in the private data: its version, and what it takes.
After that each message of the connection is a wire message: a header and a body.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from aiordma.errors import ProtocolError

MAGIC = b"aiMS"
VERSION = 1
MAX_WINDOW = 0xFFFF

# magic, version, features, window, announcements, reserved, slot_size, max_frames, max_nbytes
_HELLO = struct.Struct(">4sBBHHHIIQ")
HELLO_SIZE = _HELLO.size
# kind, reserved, credits, count
_HEADER = struct.Struct(">BBHI")
HEADER_SIZE = _HEADER.size
_SIZE = struct.Struct(">Q")
SIZE_SIZE = _SIZE.size
EAGER_OVERHEAD = HEADER_SIZE + SIZE_SIZE
"""The bytes before those of a message of one frame in EAGER."""
# number of the message, result
_DONE = struct.Struct(">QI")
_WHOLE_DONE = struct.Struct(_HEADER.format + "QI")
_NUMBER = struct.Struct(">Q")
# size, address, key, reserved
_FRAME = struct.Struct(">QQII")
FRAME_SIZE = _FRAME.size
MIN_SLOT_SIZE = HEADER_SIZE + _NUMBER.size + FRAME_SIZE


class Kind(IntEnum):
    """The kind of a wire message: the first byte of its header. Other values are refused."""

    EAGER = 1
    """A message with its bytes. `count` frames: first their sizes, then their bytes."""
    ANNOUNCE = 2
    """A message whose bytes the receiver reads. `count` frames in all; the body has its number and
    the entries of the first frames."""
    TABLE = 3
    """`count` further entries of the announcement before."""
    DONE = 4
    """The receiver does not need the memory of an announced message any more."""
    CREDIT = 5
    """Nothing but the credits in the header."""
    FINISH = 6
    """The sender sends no further message."""


class Result(IntEnum):
    """The result of an announced message, in DONE."""

    READ = 0
    """The receiver has read all its bytes."""
    DROPPED = 1
    """The receiver has dropped it."""


# Looking a member up is much faster than calling its class.
_KINDS = {kind.value: kind for kind in Kind}
_RESULTS = {result.value: result for result in Result}


@dataclass(frozen=True)
class Hello:
    """The announcement of one side when it connects. Sizes are bytes."""

    window: int
    """The number of wire messages EAGER, ANNOUNCE and TABLE that this side takes at first."""
    announcements: int
    """The number of announced messages that this side takes before it has sent DONE for them."""
    slot_size: int
    """The size of the largest wire message that this side takes."""
    max_frames: int
    """The largest number of frames in a message to this side."""
    max_nbytes: int
    """The size of the largest message to this side: all its frames together."""
    features: int = 0
    """Reserved: 0 is sent, and other values are ignored."""

    def pack(self) -> bytes:
        """Return the private data of this side, before those of the user."""
        return _HELLO.pack(
            MAGIC,
            VERSION,
            self.features,
            self.window,
            self.announcements,
            0,
            self.slot_size,
            self.max_frames,
            self.max_nbytes,
        )

    @classmethod
    def unpack(cls, private_data: bytes) -> tuple[Hello, bytes]:
        """Return the Hello of the peer, and the private data of its user.

        Raises:
            ProtocolError: the peer uses another protocol or version, or its numbers make no sense.
        """
        if len(private_data) < HELLO_SIZE or private_data[:4] != MAGIC:
            raise ProtocolError("the peer does not use the protocol of message streams")
        _, version, features, window, announcements, _, *limits = _HELLO.unpack_from(private_data)
        if version != VERSION:
            raise ProtocolError(
                f"the peer uses version {version} of message streams; this is version {VERSION}"
            )
        slot_size, max_frames, max_nbytes = limits
        hello = cls(window, announcements, slot_size, max_frames, max_nbytes, features)
        if not window or not announcements or not hello.max_frames:
            raise ProtocolError(f"the peer takes no messages: {hello}")
        if hello.slot_size < MIN_SLOT_SIZE:
            raise ProtocolError(f"the peer takes {hello.slot_size} bytes, not {MIN_SLOT_SIZE}")
        return hello, private_data[HELLO_SIZE:]


class RemoteFrame(NamedTuple):
    """A frame in the peer's registered memory: `length` bytes, as in RemoteBuffer."""

    length: int
    addr: int
    rkey: int


def pack_header(kind: Kind, returned: int, count: int) -> bytes:
    """Return the beginning of a wire message.

    `returned`: the number of credits that the sender returns. `count`: that of frames, or 0.
    """
    return _HEADER.pack(kind, 0, returned, count)


def unpack_header(message: memoryview) -> tuple[Kind, int, int]:
    """Return the arguments of pack_header() for a wire message.

    Raises:
        ProtocolError: it is too short, or of an unknown kind.
    """
    if len(message) < HEADER_SIZE:
        raise ProtocolError(f"a wire message of {len(message)} bytes has no header")
    code, _, returned, count = _HEADER.unpack_from(message)
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a wire message of the unknown kind {code}")
    return kind, returned, count


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """Return the sizes of frames in EAGER."""
    return struct.pack(f">{len(sizes)}Q", *sizes)


def unpack_sizes(body: memoryview, count: int) -> tuple[int, ...]:
    """Return the sizes of `count` frames. Their bytes are all that follows.

    Raises:
        ProtocolError: the body is shorter or longer.
    """
    start = count * SIZE_SIZE
    sizes = struct.unpack_from(f">{count}Q", body) if start <= len(body) else ()
    if start + sum(sizes) != len(body) or len(sizes) != count:
        raise ProtocolError(f"EAGER with {count} frames does not fill its {len(body)} bytes")
    return sizes


def pack_number(number: int) -> bytes:
    """Return the number of a message in ANNOUNCE."""
    return _NUMBER.pack(number)


def unpack_announcement(body: memoryview) -> tuple[int, list[RemoteFrame]]:
    """Return the number of an announced message, and the frames that the body of ANNOUNCE lists.

    Raises:
        ProtocolError: the body is too short, or as unpack_frames().
    """
    if len(body) < _NUMBER.size:
        raise ProtocolError("ANNOUNCE has no number")
    return _NUMBER.unpack_from(body)[0], unpack_frames(body[_NUMBER.size :])


def pack_frames(frames: Sequence[RemoteFrame]) -> bytes:
    """Return the entries of frames in ANNOUNCE and TABLE."""
    return b"".join([_FRAME.pack(*frame, 0) for frame in frames])


def unpack_frames(body: memoryview) -> list[RemoteFrame]:
    """Return the frames whose entries are the body.

    Raises:
        ProtocolError: the last entry is not whole, or a frame is not in 64 bits of addresses.
    """
    if len(body) % FRAME_SIZE:
        raise ProtocolError(f"{len(body)} bytes are not a number of whole frame entries")
    frames = []
    for length, addr, rkey, _ in _FRAME.iter_unpack(body):
        frame = RemoteFrame(length, addr, rkey)
        if addr + length > 1 << 64:
            raise ProtocolError(f"a frame ends behind the last address: {frame}")
        frames.append(frame)
    return frames


def pack_done(returned: int, number: int, result: Result) -> bytes:
    """Return DONE. `returned`: see pack_header()."""
    return _WHOLE_DONE.pack(Kind.DONE, 0, returned, 0, number, result)


def unpack_done(body: memoryview) -> tuple[int, Result]:
    """Return the number of the message and the result.

    Raises:
        ProtocolError: the body has another size, or the result is unknown.
    """
    if len(body) != _DONE.size:
        raise ProtocolError(f"DONE with {len(body)} bytes")
    number, code = _DONE.unpack(body)
    result = _RESULTS.get(code)
    if result is None:
        raise ProtocolError(f"DONE with the unknown result {code}")
    return number, result
