"""Rendezvous: the sender's memory is made readable, and the receiver reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags
from aiordma.loop import Loop
from aiordma.loop.task_groups import task_group
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
from aiordma.message_streams.frames import slice_of
from aiordma.message_streams.wire import RemoteFrame
from aiordma.messages.connection import Connection

if TYPE_CHECKING:
    from aiordma.message_streams.frames import Frame

Progress = Callable[[int], object]
"""A function of the user, which is called with a number of bytes."""

# A frame is read in pieces of this size, several at a time.
PIECE = 1 << 22
READS_AT_ONCE = 8
EMPTY_FRAME = RemoteFrame(0, 0, 0)


def remote_frame(part: MemorySlice) -> RemoteFrame:
    """Return how the peer reads registered memory. Of an empty frame it reads nothing.

    Raises:
        ValueError: the memory does not allow the peer to read it.
    """
    if not part.length:
        return EMPTY_FRAME
    if AccessFlags.REMOTE_READ not in part.region.access:
        raise ValueError("the peer cannot read this memory: register it with REMOTE_READ")
    return RemoteFrame(part.length, part.addr, part.region.rkey)


async def registered(
    connection: Connection, memory: Frame, access: AccessFlags, regions: list[MemoryRegion]
) -> MemorySlice:
    """Return `memory`, registered. A region that is made for it is added to `regions`.

    Raises: as Connection.register().
    """
    if isinstance(memory, (MemorySlice, MemoryRegion)):
        return slice_of(memory)
    region = await connection.register(memory, access)
    regions.append(region)
    return region[:]


async def read_frames(
    connection: Connection,
    loop: Loop,
    frames: Sequence[RemoteFrame],
    parts: Sequence[MemorySlice],
    progress: Progress | None = None,
) -> None:
    """Read each frame into a part of registered memory, several pieces at a time.

    `progress` is called with the number of bytes that have arrived, after each piece.

    Cancelling stops the waiting: see Connection.read().

    Raises: as Connection.read(), and what `progress` raises.
    """
    pieces: deque[tuple[RemoteBuffer, MemorySlice]] = deque()
    for frame, part in zip(frames, parts, strict=True):
        for start in range(0, frame.length, PIECE):
            nbytes = min(PIECE, frame.length - start)
            remote = RemoteBuffer(frame.addr + start, frame.rkey, nbytes)
            is_whole = nbytes == frame.length
            pieces.append((remote, part if is_whole else part[start : start + nbytes]))
    failures: list[Exception] = []
    done = 0

    async def read_some() -> None:
        nonlocal done
        while pieces and not failures:
            remote, into = pieces.popleft()
            try:
                await connection.read(remote, into)
                done += len(remote)
                if progress is not None:
                    progress(done)
            except Exception as error:  # a task group would wrap it
                failures.append(error)
                return

    if len(pieces) <= 1:
        await read_some()
    else:
        async with task_group(loop) as tasks:
            for _ in range(min(READS_AT_ONCE, len(pieces))):
                tasks.create_task(read_some())
    if failures:
        raise failures[0]
