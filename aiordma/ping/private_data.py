"""The private data of a ping: the size of the messages, or the reason for a rejection.

InfiniBand and RoCE pad private data with zeros, so both formats mark where they end. The private
data is optional: the peer can be any program that sends messages, or any that echoes them.
"""

from __future__ import annotations

import struct

from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions

_MAGIC = b"RDMAping"
_ANNOUNCEMENT = struct.Struct(">8sI")
_REJECTION = b"aiordma ping: "

# Only one message is in flight at a time. Messages can be large, so there are few buffers.
_DEPTH = 4


def announcement(size: int) -> bytes:
    """Return the private data that announces messages of `size` bytes, or accepts them."""
    return _ANNOUNCEMENT.pack(_MAGIC, size)


def announced_size(private_data: bytes) -> int | None:
    """Return the size in an announcement; None if the private data is something else."""
    if len(private_data) < _ANNOUNCEMENT.size:
        return None
    magic, size = _ANNOUNCEMENT.unpack_from(private_data)
    return int(size) if magic == _MAGIC else None


def rejection(reason: str) -> bytes:
    """Return the private data of a reject, with its reason."""
    return _REJECTION + reason.encode()


def rejection_reason(private_data: bytes) -> str | None:
    """Return the reason in a rejection; None if the private data is something else."""
    if not private_data.startswith(_REJECTION):
        return None
    return printable(private_data.removeprefix(_REJECTION).rstrip(b"\0").decode(errors="replace"))


def printable(text: str) -> str:
    """Return a text of the peer for the terminal: all but printable ASCII characters escaped."""
    return "".join(
        char if char.isascii() and char.isprintable() else ascii(char)[1:-1] for char in text
    )


def options_for(size: int | None, busy_poll: float = 0.0) -> ConnectionOptions:
    """Return options for messages of `size` bytes; the defaults if no size was announced."""
    if size is None:
        return DEFAULT_OPTIONS
    return ConnectionOptions(
        send_depth=_DEPTH, recv_depth=_DEPTH, max_message_size=max(size, 1), busy_poll=busy_poll
    )
