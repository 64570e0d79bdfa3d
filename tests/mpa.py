"""The frames of an iWARP connection, for a peer that uses plain TCP.

They are the part of MPA, DDP and RDMAP (RFC 5044, 6581, 5041 and 5040) that a test needs to send
frames at times at which no real device sends them.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import sys
import termios
from pathlib import Path

REQUEST, REPLY = b"MPA ID Req Frame", b"MPA ID Rep Frame"
ENHANCED, REVISION = 0x1000, 2
PEER_TO_PEER = 0x8000
_UNTAGGED, _TAGGED, _LAST = 0x01, 0x81, 0x40
_RDMAP = 0x40
READ_REQUEST, READ_RESPONSE, SEND = 1, 2, 3


def frame(ulpdu: bytes) -> bytes:
    """Return an FPDU. Its checksum is zero: the connection setup does not enable checksums."""
    return struct.pack("!H", len(ulpdu)) + ulpdu + bytes(-(len(ulpdu) + 2) % 4) + bytes(4)


def send(message: bytes, number: int = 1) -> bytes:
    """Return the FPDU of a SEND. `number` is its sequence number, from 1."""
    header = struct.pack("!BBIIII", _UNTAGGED | _LAST, _RDMAP | SEND, 0, 0, number, 0)
    return frame(header + message)


def read_response(request: bytes) -> bytes:
    """Return the FPDU that answers a read of no bytes. `request` is the read's ULPDU."""
    stag, offset = struct.unpack_from("!IQ", request, 18)
    return frame(struct.pack("!BBIQ", _TAGGED | _LAST, _RDMAP | READ_RESPONSE, stag, offset))


def request(reads: int = 16, flags: int = 0) -> bytes:
    """Return the first frame of the connecting side. `reads` is its IRD and ORD.

    `flags`: PEER_TO_PEER asks that the connection is established by a frame of this side.
    """
    return REQUEST + struct.pack("!HHHH", ENHANCED | REVISION, 4, reads | flags, reads | flags)


def with_wrong_version(frame: bytes) -> bytes:
    """Return an FPDU with a version of DDP that does not exist."""
    return frame[:2] + bytes([frame[2] | 0x03]) + frame[3:]


async def read_request(reader: asyncio.StreamReader) -> None:
    """Read the request of the connecting side."""
    key, _, length = struct.unpack("!16sHH", await reader.readexactly(20))
    assert key == REQUEST, key
    await reader.readexactly(length)


def reply(reads: int) -> bytes:
    """Return the reply to a request. `reads` is the IRD and ORD of the accepting side."""
    return REPLY + struct.pack("!HHHH", ENHANCED | REVISION, 4, reads, reads)


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """Read the reply to request(). Return its private data."""
    key, _, length = struct.unpack("!16sHH", await reader.readexactly(20))
    assert key == REPLY, key
    return await reader.readexactly(length)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read the next FPDU. Return its RDMAP opcode and its ULPDU."""
    (length,) = struct.unpack("!H", await reader.readexactly(2))
    rest = await reader.readexactly(length + -(length + 2) % 4 + 4)
    return rest[1] & 0xF, rest[:length]


# --- the TCP connections below iWARP ---

_ESTABLISHED = "01"


def unacknowledged(writer: asyncio.StreamWriter) -> int:
    """Return the number of written bytes that the peer's TCP has not acknowledged."""
    descriptor: int = writer.get_extra_info("socket").fileno()
    in_socket = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    return writer.transport.get_write_buffer_size() + int.from_bytes(in_socket, sys.byteorder)


def is_connected(port: int) -> bool:
    """Return True if this machine has a TCP connection whose local port is `port`.

    A connection that one side has closed or reset is not counted. siw uses connections of the
    kernel, which have no file descriptor.
    """
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return any(
        state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port
        for _, local, _, state, *_ in lines
    )
