"""The frames of distributed, as the frames of a message of a MessageStream.

distributed serializes an object into a list of frames, few or thousands, of any size. A message
begins with a frame of its own, the head: the number and the sizes of all frames (64 bits each, big
endian), then the bytes of the small frames, one after another. Each large frame follows as a frame
of the message, so that the device reads it from memory to memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from distributed.protocol.utils import host_array

from aiordma.errors import ProtocolError

LARGE = 1 << 16
"""The size in bytes from which a frame is not copied into the head. Below, registering memory on
both sides and a read of its own take longer than copying."""

Frame = bytes | bytearray | memoryview


def pack(frames: Sequence[Frame]) -> tuple[list[Frame], int]:
    """Return the frames of a message that carries `frames`, and their size in bytes."""
    views = [memoryview(frame) for frame in frames]
    sizes = [view.nbytes for view in views]
    prelude = struct.pack(f">Q{len(sizes)}Q", len(sizes), *sizes)
    small = [view for view in views if view.nbytes < LARGE]
    head = b"".join([prelude, *small])
    large = [view for view in views if view.nbytes >= LARGE]
    return [head, *large], len(head) + sum(view.nbytes for view in large)


def allocate(sizes: Sequence[int]) -> list[memoryview]:
    """Return memory for the frames of a message. It is not initialized."""
    return [host_array(size) for size in sizes]


def unpack(message: Sequence[memoryview]) -> list[memoryview]:
    """Return the frames of distributed that a message carries.

    Each is in memory of its own, because an object that is made of a frame keeps its memory. Only
    the first one, which distributed decodes at once, stays in the head.

    Raises:
        ProtocolError: the message does not have the frames that its head lists.
    """
    try:
        head, *large = message
        (count,) = struct.unpack_from(">Q", head)
        sizes = struct.unpack_from(f">{count}Q", head, 8)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a message of distributed without a head: {error}") from None
    start = head.nbytes - sum(size for size in sizes if size < LARGE)
    if start != 8 + 8 * count or [view.nbytes for view in large] != [
        size for size in sizes if size >= LARGE
    ]:
        raise ProtocolError("a message of distributed does not have the frames that it lists")
    rest = iter(large)
    frames: list[memoryview] = []
    for size in sizes:
        if size >= LARGE:
            frames.append(next(rest))
        else:
            frame = head[start : start + size]
            frames.append(memoryview(bytearray(frame)) if frames else frame)
            start += size
    return frames
