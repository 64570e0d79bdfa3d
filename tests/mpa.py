"""A peer of an iWARP connection in plain TCP: just enough of MPA, DDP and RDMAP (RFC 5044, 6581,
5041 and 5040) to do what no real device does at a time of a test's choosing."""

from __future__ import annotations

import asyncio
import struct

REQUEST, REPLY = b"MPA ID Req Frame", b"MPA ID Rep Frame"
ENHANCED, REVISION = 0x1000, 2
_UNTAGGED, _TAGGED, _LAST = 0x01, 0x81, 0x40
_RDMAP = 0x40
READ_REQUEST, READ_RESPONSE, SEND = 1, 2, 3


def frame(ulpdu: bytes) -> bytes:
    """An FPDU, whose checksum nobody looks at: none was agreed on."""
    return struct.pack("!H", len(ulpdu)) + ulpdu + bytes(-(len(ulpdu) + 2) % 4) + bytes(4)


def send(message: bytes, number: int = 1) -> bytes:
    """The FPDU of a SEND; `number` counts them from 1."""
    header = struct.pack("!BBIIII", _UNTAGGED | _LAST, _RDMAP | SEND, 0, 0, number, 0)
    return frame(header + message)


def read_response(request: bytes) -> bytes:
    """The answer to a read of no bytes."""
    stag, offset = struct.unpack_from("!IQ", request, 18)
    return frame(struct.pack("!BBIQ", _TAGGED | _LAST, _RDMAP | READ_RESPONSE, stag, offset))


def request(reads: int = 16) -> bytes:
    """What the connecting side says first: so many reads may be under way, each way."""
    return REQUEST + struct.pack("!HHHH", ENHANCED | REVISION, 4, reads, reads)


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """The answer to that: its private data."""
    key, _, length = struct.unpack("!16sHH", await reader.readexactly(20))
    assert key == REPLY, key
    return await reader.readexactly(length)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next FPDU: which of RDMAP's messages it is, and the ULPDU."""
    (length,) = struct.unpack("!H", await reader.readexactly(2))
    rest = await reader.readexactly(length + -(length + 2) % 4 + 4)
    return rest[1] & 0xF, rest[:length]
