"""What the two sides say in private data: how large the messages will be, or why there are none.

InfiniBand and RoCE pad private data with zeros, so each of these says where it ends. A peer that
says nothing of the kind is welcome, too: it may be any program that sends, or any that echoes.
"""

from __future__ import annotations

import struct

from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions

_MAGIC = b"RDMAping"
_GREETING = struct.Struct(">8sI")
_REFUSAL = b"aiordma ping: "

# One message is under way at a time. Large ones are why there are so few receive buffers.
_DEPTH = 4


def greeting(size: int) -> bytes:
    """Private data that announces messages of `size` bytes, or agrees to them."""
    return _GREETING.pack(_MAGIC, size)


def announced_size(private_data: bytes) -> int | None:
    """The size in a greeting; None if it is none."""
    if len(private_data) < _GREETING.size:
        return None
    magic, size = _GREETING.unpack_from(private_data)
    return int(size) if magic == _MAGIC else None


def refusal(reason: str) -> bytes:
    """Private data of a reject that says why."""
    return _REFUSAL + reason.encode()


def refusal_reason(private_data: bytes) -> str | None:
    """The reason in a refusal; None if it is none."""
    if not private_data.startswith(_REFUSAL):
        return None
    return private_data.removeprefix(_REFUSAL).rstrip(b"\0").decode(errors="replace")


def options_for(size: int | None, busy_poll: float = 0.0) -> ConnectionOptions:
    """Options that fit messages of a size; the defaults for a peer that announced none."""
    if size is None:
        return DEFAULT_OPTIONS
    return ConnectionOptions(
        send_depth=_DEPTH, recv_depth=_DEPTH, max_message_size=max(size, 1), busy_poll=busy_poll
    )
