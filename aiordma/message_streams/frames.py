"""Frames: the pieces of a message, and the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiordma.memory import MemoryRegion, MemorySlice, byte_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Frame = Buffer | MemorySlice | MemoryRegion
    """Memory of any kind."""

T = TypeVar("T", memoryview, MemorySlice)


def frames_of(message: Frame | Sequence[Frame]) -> list[memoryview | MemorySlice]:
    """Return the frames of a message, which is one buffer or a list of frames."""
    frames: Sequence[Any] = message if isinstance(message, (list, tuple)) else [message]
    return [
        slice_of(frame) if isinstance(frame, (MemorySlice, MemoryRegion)) else byte_view(frame)
        for frame in frames
    ]


def slice_of(memory: MemorySlice | MemoryRegion) -> MemorySlice:
    """Return all of registered memory as a slice."""
    return memory if isinstance(memory, MemorySlice) else memory[:]


def bytes_of(memory: Frame) -> memoryview:
    """Return a view of the bytes of memory of any kind."""
    return memory.view if isinstance(memory, MemorySlice) else byte_view(memory)


def nbytes_of(memory: Frame) -> int:
    """Return the size in bytes of memory of any kind."""
    if isinstance(memory, (MemorySlice, MemoryRegion)):
        return len(memory)
    with memoryview(memory) as view:
        return view.nbytes


def check_room(rooms: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise an exception if a frame is larger than its buffer. Both are given in bytes.

    Raises:
        ValueError: a buffer is too small.
    """
    for room, size in zip(rooms, sizes, strict=True):
        if size > room:
            raise ValueError(f"a frame of {size} bytes does not fit into {room}")


def parts_for(buffers: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """Return the memory for frames of these sizes: a buffer for each, or one for all together.

    Raises:
        ValueError: a buffer is too small.
    """
    if len(buffers) == len(sizes):
        check_room([len(buffer) for buffer in buffers], sizes)
        return [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    parts, start = [], 0
    for size in sizes:
        parts.append(buffers[0][start : start + size])
        start += size
    return parts
