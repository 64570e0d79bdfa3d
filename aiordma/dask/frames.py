"""The frames of distributed, as messages of a MessageStream.

distributed serializes an object into a list of frames, few or thousands, of any size. First comes
the head: the number and the sizes of all frames (64 bits each, big endian), then the bytes of the
small frames, one after another. A head that is a little too long for a small message of the stream
is sent in parts, as several of them. If there are large frames, a message with these follows. The
peer's device reads each of them from memory to memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

from distributed.protocol.utils import host_array

from aiordma.errors import ProtocolError
from aiordma.message_streams.message_stream import MessageStream

LARGE = 1 << 16
"""The size in bytes from which a frame is not copied into the head. Below, registering memory on
both sides and a read of its own take longer than copying."""

MAX_PARTS = 4
"""The number of parts up to which a head is sent as small messages. Longer ones are read."""

Frame = bytes | bytearray | memoryview


class Packed(NamedTuple):
    """The messages that carry the frames of an object."""

    parts: list[bytes]
    """The head, whole or in parts. Each is a message."""
    large: list[memoryview]
    """The frames of the message that follows; none: no message follows."""
    nbytes: int
    """The size of all messages in bytes."""


def pack(frames: Sequence[Frame], part_nbytes: int) -> Packed:
    """Return the messages for frames. `part_nbytes`: the size of the largest small message."""
    views = [memoryview(frame) for frame in frames]
    sizes = [view.nbytes for view in views]
    prelude = struct.pack(f">Q{len(sizes)}Q", len(sizes), *sizes)
    head = b"".join([prelude, *(view for view in views if view.nbytes < LARGE)])
    large = [view for view in views if view.nbytes >= LARGE]
    nbytes = len(head) + sum(view.nbytes for view in large)
    if len(prelude) > part_nbytes or len(head) > MAX_PARTS * part_nbytes:
        return Packed([head], large, nbytes)
    starts = range(0, len(head), part_nbytes)
    return Packed([head[start : start + part_nbytes] for start in starts], large, nbytes)


async def receive(stream: MessageStream) -> list[memoryview]:
    """Receive the messages of an object, and return its frames. Cancelling can lose some of them.

    Raises:
        ProtocolError: the messages do not have the frames that the head lists.
        Others: as MessageStream.recv_frames().
    """
    head = await _receive_part(stream)
    sizes = listed_sizes(head)
    missing = _prelude_nbytes(sizes) + sum(filter(_is_small, sizes)) - head.nbytes
    if missing > 0:
        parts = [head]
        while missing > 0:
            parts.append(await _receive_part(stream))
            missing -= parts[-1].nbytes
        head = memoryview(bytearray().join(parts))
    large: list[memoryview] = []
    if not all(map(_is_small, sizes)):
        large = await _receive_frames(stream)
    return unpack(sizes, head, large)


async def _receive_frames(stream: MessageStream) -> list[memoryview]:
    return cast("list[memoryview]", await stream.recv_frames(_allocate))


async def _receive_part(stream: MessageStream) -> memoryview:
    frames = await _receive_frames(stream)
    if len(frames) != 1 or not frames[0].nbytes:
        raise ProtocolError("a message of distributed without a head")
    return frames[0]


def _allocate(sizes: Sequence[int]) -> list[memoryview]:
    return [host_array(size) for size in sizes]  # not initialized


def _is_small(size: int) -> bool:
    return size < LARGE


def _prelude_nbytes(sizes: Sequence[int]) -> int:
    return 8 + 8 * len(sizes)


def listed_sizes(head: memoryview) -> tuple[int, ...]:
    """Return the sizes of frames that the beginning of a head lists.

    Raises:
        ProtocolError: the head is too short.
    """
    try:
        (count,) = struct.unpack_from(">Q", head)
        return struct.unpack_from(f">{count}Q", head, 8)
    except (struct.error, OverflowError) as error:
        raise ProtocolError(f"a message of distributed without a head: {error}") from None


def unpack(sizes: Sequence[int], head: memoryview, large: Sequence[memoryview]) -> list[memoryview]:
    """Return the frames of these sizes, from a head and the large frames.

    Each is in memory of its own, because an object that is made of a frame keeps its memory. Only
    the first one, which distributed decodes at once, stays in the head.

    Raises:
        ProtocolError: these are not the frames that are listed.
    """
    start = _prelude_nbytes(sizes)
    if start + sum(filter(_is_small, sizes)) != head.nbytes or [view.nbytes for view in large] != [
        size for size in sizes if not _is_small(size)
    ]:
        raise ProtocolError("a message of distributed does not have the frames that it lists")
    rest = iter(large)
    frames: list[memoryview] = []
    for size in sizes:
        if not _is_small(size):
            frames.append(next(rest))
            continue
        frame = head[start : start + size]
        frames.append(memoryview(bytearray(frame)) if frames else frame)
        start += size
    return frames
