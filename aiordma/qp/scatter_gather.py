"""ScatterGatherList: the pieces of memory that the device reads or fills for one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from aiordma.enums import AccessFlags
from aiordma.memory import MemoryRegion, MemorySlice, PooledBuffer, byte_view
from aiordma.qp.send_queue import SendQueue
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.queue_pair import Segment

if TYPE_CHECKING:
    from typing_extensions import Buffer, TypeIs

SMALL_READ = 32
PAGE_SIZE = 4096

Registered = MemorySlice | MemoryRegion
if TYPE_CHECKING:
    Source = Buffer | Registered | Sequence[Buffer | Registered]
    Sink = Registered | Sequence[Registered]
Call = Callable[[Callable[[], None]], Awaitable[None]]
"""Awaits a function in a worker thread."""


def is_list(data: Source) -> TypeIs[Sequence[Buffer | Registered]]:
    """Return True for several pieces, in a list or a tuple."""
    return isinstance(data, (list, tuple))


def is_region(memory: Source | Sink) -> TypeIs[Registered]:
    """Return True for registered memory in one piece."""
    return isinstance(memory, (MemorySlice, MemoryRegion))


def is_registered(data: Source) -> bool:
    """Return True for registered memory, and for a list that contains some."""
    if is_list(data):
        return any(map(is_region, data))
    return is_region(data)


def join_buffers(data: Source) -> memoryview:
    """Return a message without registered memory as contiguous bytes.

    The pieces of a list are copied. A single buffer is not copied, and the result refers to it.
    """
    if is_list(data):
        return memoryview(b"".join([byte_view(piece) for piece in data if not is_region(piece)]))
    assert not is_region(data)
    return byte_view(data)


class ScatterGatherList:
    """The memory of one request, in pieces. It must be released when the request has ended."""

    __slots__ = ("_buffer", "_regions", "nbytes", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.nbytes = 0
        self._regions: list[MemoryRegion] = []
        self._buffer: PooledBuffer | None = None

    def add(self, part: MemorySlice, pd: ProtectionDomain) -> None:
        """Add registered memory.

        Raises:
            ValueError: it is closed, or not registered in the protection domain `pd`.
        """
        region = part.region
        region.acquire(pd)
        self._regions.append(region)
        self._add_segment(part.addr, len(part), part.lkey)

    def add_whole(
        self, memory: Registered, pd: ProtectionDomain, max_bytes: int, target: str
    ) -> None:
        """Add all of one piece of registered memory, as the only one.

        Raises:
            ValueError: it has more than `room` bytes, or as add().
        """
        region = memory if isinstance(memory, MemoryRegion) else memory.region
        segment = memory.segment
        nbytes = segment[1]
        if nbytes > max_bytes:
            check_fits(nbytes, max_bytes, target)
        region.acquire(pd)
        self._regions.append(region)
        self.nbytes = nbytes
        if nbytes:
            self.segments.append(segment)

    def use_buffer(self, buffer: PooledBuffer) -> None:
        """Use this buffer for the copies that add_copy() makes."""
        self._buffer = buffer

    def add_copy(self, data: memoryview, start: int) -> None:
        """Copy a piece into the buffer of use_buffer(), at `start`, and add the copy."""
        buffer = self._buffer
        assert buffer is not None
        buffer.view[start : start + len(data)] = data
        self._add_segment(buffer.address + start, len(data), buffer.lkey)

    def _add_segment(self, address: int, length: int, lkey: int) -> None:
        self.nbytes += length
        if self.segments:
            last, length_of_last, key_of_last = self.segments[-1]
            if (last + length_of_last, key_of_last) == (address, lkey):
                self.segments[-1] = (last, length_of_last + length, lkey)
                return
        if length:
            self.segments.append((address, length, lkey))

    def release(self) -> None:
        """Release all memory: the device does not use it any more."""
        while self._regions:
            self._regions.pop().release()
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


class ScatterGatherBuilder:
    """Makes scatter-gather lists of users' memory. Memory that is not registered is copied."""

    def __init__(self, sends: SendQueue, max_sge: int, call: Call, pd: ProtectionDomain) -> None:
        """`pd`: the protection domain that memory must belong to."""
        self._pd = pd
        self._sends = sends
        self._max_sge = max_sge
        self.call_in_worker = call

    def single(self, memory: Registered, max_bytes: int, target: str) -> ScatterGatherList:
        """Return a list of registered memory in one piece.

        The caller releases it, or makes sure that it is released when the request has ended.

        Raises: ValueError as sources().
        """
        sgl = ScatterGatherList()
        sgl.add_whole(memory, self._pd, max_bytes, target)
        return sgl

    async def sources(self, data: Source, max_bytes: int, target: str) -> ScatterGatherList:
        """Return a list of the memory to send or to write.

        The caller releases it, or makes sure that it is released when the request has ended. If
        cancelled, all memory is released.

        Raises:
            ValueError: the data has more than `room` bytes, or too many pieces, or is not
                registered for this connection.
            VerbsError: ENOMEM when no more memory can be registered for copies.
        """
        pieces = [
            piece[:] if is_region(piece) else byte_view(piece)
            for piece in (data if is_list(data) else [data])
        ]
        check_fits(sum(map(len, pieces)), max_bytes, target)
        sgl = ScatterGatherList()
        try:
            await self._fill(sgl, pieces)
            _check_count(len(sgl.segments), self._max_sge)
        except BaseException:
            sgl.release()
            raise
        return sgl

    async def _fill(self, sgl: ScatterGatherList, pieces: list[MemorySlice | memoryview]) -> None:
        copied = sum(len(piece) for piece in pieces if isinstance(piece, memoryview))
        if copied:
            buffer = self._sends.try_buffer(copied)
            sgl.use_buffer(buffer or await self._sends.buffer(copied, self.call_in_worker))
        start = 0
        for piece in pieces:
            if not isinstance(piece, memoryview):
                sgl.add(piece, self._pd)
            elif len(piece):
                sgl.add_copy(piece, start)
                start += len(piece)

    def sink(self, into: Registered, nbytes: int, access: AccessFlags) -> ScatterGatherList:
        """Return a list of the memory to read `nbytes` bytes into, in one piece: see sinks()."""
        if nbytes != len(into):
            check_fits(nbytes, len(into), "the memory to read into")
            into = into[:nbytes]
        _check_access(into if isinstance(into, MemoryRegion) else into.region, access)
        sgl = ScatterGatherList()
        sgl.add_whole(into, self._pd, nbytes, "it")
        return sgl

    def sinks(
        self,
        into: Sink,
        nbytes: int,
        access: AccessFlags,
        max_pieces: int,
        iwarp_addr: int | None = None,
    ) -> deque[ScatterGatherList]:
        """Return lists of the memory to read `nbytes` bytes into, of `max_pieces` pieces each.

        `iwarp_addr`: the address that is read, on iWARP. A piece that crosses_page() is split.

        The caller releases each list, or makes sure that it is released when its request has ended.

        Raises:
            ValueError: the memory is too small, in too many pieces, not registered with `access`,
                or not registered for this connection.
        """
        pieces = [piece[:] for piece in ([into] if is_region(into) else into)]
        check_fits(nbytes, sum(map(len, pieces)), "the memory to read into")
        wanted = list(_first(pieces, nbytes))
        _check_count(len(wanted), self._max_sge)
        if iwarp_addr is not None:
            wanted = list(_split_at_pages(wanted, iwarp_addr))
        requests: deque[ScatterGatherList] = deque()
        try:
            for start in range(0, len(wanted), max_pieces):
                requests.append(ScatterGatherList())
                for piece in wanted[start : start + max_pieces]:
                    _check_access(piece.region, access)
                    requests[-1].add(piece, self._pd)
        except BaseException:
            for sgl in requests:
                sgl.release()
            raise
        return requests


def _first(pieces: Iterable[MemorySlice], nbytes: int) -> Iterable[MemorySlice]:
    """Yield the parts of the pieces that contain the first `nbytes` bytes."""
    for piece in pieces:
        part = piece[:nbytes]
        nbytes -= len(part)
        if len(part):
            yield part


def crosses_page(addr: int, nbytes: int) -> bool:
    """Return True if an iWARP read of these bytes of the peer must be split.

    Linux's soft-iWARP answers a read of up to 32 bytes that crosses a page of its source with wrong
    bytes (seen on Linux 6.1).
    """
    return nbytes <= SMALL_READ and addr % PAGE_SIZE + nbytes > PAGE_SIZE


def _split_at_pages(pieces: Iterable[MemorySlice], addr: int) -> Iterable[MemorySlice]:
    """Yield pieces of a read from `addr`. Those that crosses_page() are split there."""
    for piece in pieces:
        if crosses_page(addr, len(piece)):
            first = PAGE_SIZE - addr % PAGE_SIZE
            yield piece[:first]
            yield piece[first:]
        else:
            yield piece
        addr += len(piece)


def _check_access(region: MemoryRegion, needed: AccessFlags) -> None:
    if int(needed) & ~int(region.access):  # the operators of enum.Flag take ten times as long
        raise ValueError(f"the memory to read into must be registered with {needed!r}")


def _check_count(pieces: int, max_sge: int) -> None:
    if pieces > max_sge:
        raise ValueError(
            f"{pieces} pieces of memory in one request; max_sge is {max_sge}, "
            "which ConnectionOptions can raise"
        )


def check_fits(nbytes: int, max_bytes: int, target: str) -> None:
    """Raise ValueError if `nbytes` is more than `room`. `where` names the room in the message."""
    if nbytes > max_bytes:
        raise ValueError(f"{nbytes} bytes do not fit into {target} of {max_bytes}")
