"""ScatterGatherBuilder: pieces of memory as segments of a request, acquired and released."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
from collections.abc import Callable
from typing import Any

import pytest
from fakes.qp import (
    BUFFER_SIZE,
    ELSEWHERE,
    HERE,
    FakeRegion,
    SendRig,
    call_at_once,
)

from aiordma import AccessFlags, VerbsError
from aiordma.qp import is_registered, join_buffers
from aiordma.qp.scatter_gather import ScatterGatherBuilder, ScatterGatherList

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("time_limit")]

COPY, COPY_KEY = 0x1000, 99  # the address and key of the pool's buffers
WRITABLE = AccessFlags.LOCAL_WRITE
ROOM = 1 << 20


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_double))


class Rig(SendRig):
    """A ScatterGatherBuilder whose copies go to the buffers of a FakePool."""

    def __init__(self, free_buffers: int = 1, max_sge: int = 4) -> None:
        super().__init__(free_buffers)
        self.builder = ScatterGatherBuilder(self.queue, max_sge, call_at_once)
        self.builder.pd = HERE

    async def sources(self, data: Any, room: int = ROOM) -> ScatterGatherList:
        return await self.builder.sources(data, room, "the room")

    async def copied(self, data: Any) -> bytes:
        """Return the bytes that the device would read. All data must be copied."""
        sgl = await self.sources(data)
        assert sgl._buffer is not None
        [(address, length, lkey)] = sgl.segments
        assert (address, lkey, length) == (COPY, COPY_KEY, sgl.nbytes)
        copy = bytes(sgl._buffer.view[:length])
        sgl.release()
        assert self.pool.is_whole
        return copy

    def sinks(self, into: Any, nbytes: int, at_once: int = 30) -> list[ScatterGatherList]:
        return [*self.builder.sinks(into, nbytes, WRITABLE, at_once)]


# --- registered or not ---


async def test_is_registered() -> None:
    region = FakeRegion()
    some: list[Any] = [region, region[:5], [region], (region[:5],), [b"a", region], [region, b"a"]]
    none: list[Any] = [b"a", bytearray(b"a"), [], [b"a", b"b"], memoryview(region), (b"a",)]
    assert [is_registered(data) for data in some] == [True] * len(some)
    assert [is_registered(data) for data in none] == [False] * len(none)


async def test_join_buffers_joins_pieces() -> None:
    numbers = array.array("h", [1, 2])
    grid = memoryview(bytes(range(8))).cast("B", [2, 2, 2])
    assert bytes(join_buffers([])) == b""
    assert bytes(join_buffers([b"", b""])) == b""
    assert bytes(join_buffers([b"one", bytearray(b"two"), memoryview(b"three")])) == b"onetwothree"
    assert bytes(join_buffers((numbers, b"!"))) == numbers.tobytes() + b"!"
    assert bytes(join_buffers([grid, memoryview(b"abcdef")[::2]])) == bytes(range(8)) + b"ace"
    assert len(join_buffers(numbers)) == 4


async def test_join_buffers_does_not_copy_a_single_buffer() -> None:
    memory = bytearray(b"hello")
    view = join_buffers(memory)
    memory[0] = ord("j")
    assert bytes(view) == b"jello"
    with pytest.raises(BufferError):
        memory.append(0)
    view.release()
    memory.append(0)


async def test_join_buffers_keeps_no_reference_to_pieces() -> None:
    memory = bytearray(b"hello")
    assert bytes(join_buffers([memory, b"!"])) == b"hello!"
    memory.append(0)


# --- sources: memory to send or write ---


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: (one,)])
async def test_registered_memory_is_not_copied(wrap: Callable[[object], object]) -> None:
    rig, region = Rig(), FakeRegion(100)
    sgl = await rig.sources(wrap(region))
    assert sgl.segments == [(0x10000, 100, 11)]
    assert (sgl.nbytes, region.uses) == (100, 1)
    sgl.release()
    assert region.uses == 0
    part = await rig.sources(wrap(region[10:30]))
    assert part.segments == [(0x1000A, 20, 11)]
    assert (part.nbytes, region.uses) == (20, 1)
    part.release()
    part.release()
    assert region.uses == 0
    assert len(rig.pool.free) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        bytearray(b"hello"),
        array.array("d", [1.0, 2.0]),
        memoryview(b"abcdef")[::2],
        memoryview(bytes(range(24))).cast("B", [2, 3, 4]),
        Point(1, 2.0),
        (Point * 3)(),
        ctypes.c_int(7),
    ],
    ids=lambda data: memoryview(data).format,
)
async def test_other_memory_is_copied(data: Any) -> None:
    expected = memoryview(data).tobytes()
    assert await Rig().copied(data) == expected
    assert await Rig().copied([b"<", data, b">"]) == b"<" + expected + b">"


async def test_copies_are_made_at_once_and_keep_no_reference() -> None:
    rig, memory = Rig(), bytearray(b"hello")
    sgl = await rig.sources([memory, b"!"])
    memory.clear()
    assert sgl._buffer is not None
    assert bytes(sgl._buffer.view[:6]) == b"hello!"
    sgl.release()


async def test_consecutive_copies_are_one_segment() -> None:
    rig, region = Rig(), FakeRegion()
    sgl = await rig.sources([b"head", b"er", region[:10], b"tr", b"ail", b"er"])
    assert sgl.segments == [
        (COPY, 6, COPY_KEY),
        (0x10000, 10, 11),
        (COPY + 6, 7, COPY_KEY),
    ]
    assert sgl.nbytes == 23
    assert sgl._buffer is not None
    assert bytes(sgl._buffer.view[:13]) == b"headertrailer"
    assert len(rig.pool.free) == 0
    sgl.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_adjacent_parts_are_one_segment() -> None:
    rig, first, second = Rig(), FakeRegion(100, 1), FakeRegion(100, 2)
    sgl = await rig.sources([first[:10], first[10:30], first[40:50], first[30:40], second])
    assert sgl.segments == [
        (0x10000, 30, 11),
        (0x10000 + 40, 10, 11),
        (0x10000 + 30, 10, 11),
        (0x20000, 100, 12),
    ]
    assert (first.uses, second.uses) == (4, 1)
    sgl.release()
    assert (first.uses, second.uses) == (0, 0)


async def test_adjacent_regions_with_different_keys_are_two_segments() -> None:
    rig, first = Rig(), FakeRegion(0x10000, 1)
    second = FakeRegion(100, 2)
    assert first.addr + len(first) == second.addr
    sgl = await rig.sources([first, second])
    assert sgl.segments == [(0x10000, 0x10000, 11), (0x20000, 100, 12)]
    sgl.release()


async def test_a_second_release_does_nothing() -> None:
    rig, region = Rig(), FakeRegion()
    sgl = await rig.sources([region, b"copy"])
    for _ in range(2):
        sgl.release()
        assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_empty_pieces_make_no_segments() -> None:
    rig, region = Rig(), FakeRegion()
    sgl = await rig.sources([b"", region[:0], b"a", region[5:5], b"", region[:10], b""])
    assert sgl.segments == [(COPY, 1, COPY_KEY), (0x10000, 10, 11)]
    assert sgl.nbytes == 11
    sgl.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


@pytest.mark.parametrize("data", [b"", [], [b"", b""], (bytearray(),)])
async def test_empty_data_needs_no_buffer(data: Any) -> None:
    rig = Rig(free_buffers=0)
    sgl = await rig.sources(data)
    assert (sgl.segments, sgl.nbytes) == ([], 0)
    assert rig.pool.requested == []
    sgl.release()


async def test_empty_copies_beside_registered_memory_need_no_buffer() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    sgl = await rig.sources([b"", region, b""])
    assert sgl.segments == [(0x10000, 100, 11)]
    assert rig.pool.requested == []
    sgl.release()
    assert region.uses == 0


async def test_data_of_exactly_the_allowed_size_is_accepted() -> None:
    rig, region = Rig(), FakeRegion()
    sgl = await rig.sources([b"ab", region], 102)
    assert sgl.nbytes == 102
    sgl.release()


@pytest.mark.parametrize("with_registered", [False, True])
async def test_data_that_is_too_large_is_refused(with_registered: bool) -> None:
    rig, region = Rig(), FakeRegion()
    data = [b"ab", region] if with_registered else [b"ab", bytes(100)]
    with pytest.raises(ValueError, match="102 bytes do not fit into the room of 101"):
        await rig.sources(data, 101)
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_too_many_pieces_are_refused_and_released() -> None:
    rig, region = Rig(max_sge=3), FakeRegion()
    for parts in ([region[n : n + 1] for n in (0, 2, 4, 6)], [b"a", region[:1], b"b", region[2:3]]):
        with pytest.raises(ValueError, match="4 pieces of memory in one request; max_sge is 3"):
            await rig.sources(parts)
        assert (region.uses, rig.pool.is_whole) == (0, True)
    sgl = await rig.sources([region[n : n + 1] for n in (0, 1, 2, 3, 5, 7)])
    assert len(sgl.segments) == 3  # adjacent pieces count once
    sgl.release()


@pytest.mark.parametrize("pd", [ELSEWHERE, None])
async def test_memory_of_another_domain_is_refused_and_the_rest_released(pd: Any) -> None:
    rig, region, other = Rig(), FakeRegion(100, 1), FakeRegion(100, 2, pd)
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.sources([b"copy", region, other, region])
    assert (region.uses, other.uses, rig.pool.is_whole) == (0, 0, True)


async def test_without_a_queue_pair_all_memory_is_refused() -> None:
    rig, region = Rig(), FakeRegion()
    rig.builder.pd = None
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.sources(region)
    assert region.uses == 0


async def test_closed_memory_is_refused_and_the_rest_released() -> None:
    rig, region, closed = Rig(), FakeRegion(100, 1), FakeRegion(100, 2)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        await rig.sources([b"copy", region, closed[:5]])
    assert (region.uses, closed.uses, rig.pool.is_whole) == (0, 0, True)


async def test_a_region_in_use_is_not_disposed_before_its_release() -> None:
    rig, region = Rig(), FakeRegion()
    sgl = await rig.sources([region, region[:5]])
    region.close()
    assert memoryview(region)
    sgl.release()
    with pytest.raises(BufferError):
        memoryview(region)


async def test_a_piece_that_is_not_memory_is_refused() -> None:
    rig, region = Rig(), FakeRegion()
    things: list[Any] = ["text", [region, "text"], [region, [b"nested"]]]
    for thing in things:
        with pytest.raises(TypeError):
            await rig.sources(thing)
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_without_memory_for_copies_nothing_is_acquired() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.builder.call_in_worker = fail
    with pytest.raises(VerbsError, match="ibv_reg_mr"):
        await rig.sources([region, b"copy"])
    assert region.uses == 0


async def test_sources_waits_for_a_buffer_for_copies() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    sgl = await rig.sources([b"co", region, b"py"])
    assert rig.pool.requested == [(4, call_at_once)]
    assert len(sgl.segments) == 3
    sgl.release()
    assert rig.pool.is_whole


async def test_cancelling_the_wait_for_a_buffer_acquires_nothing() -> None:
    async def never(function: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.builder.call_in_worker = never
    task = asyncio.create_task(rig.sources([region, b"copy"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert region.uses == 0


async def test_a_copy_can_fill_its_buffer() -> None:
    data = bytes(range(256)) * (BUFFER_SIZE // 256)
    assert await Rig().copied([data[:100], data[100:]]) == data


# --- sinks: memory to read into ---


async def test_a_region_can_be_the_target_of_a_read() -> None:
    rig, region = Rig(), FakeRegion(100)
    [sgl] = rig.sinks(region, 40)
    assert (sgl.segments, sgl.nbytes) == ([(0x10000, 40, 11)], 40)
    assert region.uses == 1
    sgl.release()
    [sgl] = rig.sinks(region[20:], 80)
    assert sgl.segments == [(0x10000 + 20, 80, 11)]
    sgl.release()
    assert region.uses == 0


async def test_pieces_are_filled_in_order_and_the_rest_is_not_used() -> None:
    rig, first, second, third = Rig(), *(FakeRegion(100, number) for number in (1, 2, 3))
    [sgl] = rig.sinks([second[50:], first[:0], first, third], 90)
    assert sgl.segments == [(0x20000 + 50, 50, 12), (0x10000, 40, 11)]
    assert (first.uses, second.uses, third.uses) == (1, 1, 0)
    sgl.release()
    assert (first.uses, second.uses) == (0, 0)


@pytest.mark.parametrize(("at_once", "shape"), [(1, [1] * 4), (2, [2, 2]), (3, [3, 1]), (4, [4])])
async def test_reads_are_split_by_the_number_of_pieces_at_once(
    at_once: int, shape: list[int]
) -> None:
    rig, region = Rig(), FakeRegion(100)
    parts = [region[start : start + 10] for start in (0, 20, 40, 60)]
    requests = rig.sinks(parts, 35, at_once)
    assert [len(one.segments) for one in requests] == shape
    assert [segment for one in requests for segment in one.segments] == [
        (0x10000, 10, 11),
        (0x10000 + 20, 10, 11),
        (0x10000 + 40, 10, 11),
        (0x10000 + 60, 5, 11),
    ]
    assert sum(one.nbytes for one in requests) == 35
    assert region.uses == 4
    for left, one in zip((4, 3, 2, 1), requests, strict=False):
        assert region.uses <= left
        one.release()
    assert region.uses == 0


async def test_a_read_of_no_bytes_makes_no_request() -> None:
    rig, region = Rig(), FakeRegion()
    assert rig.sinks(region, 0) == rig.sinks([], 0) == []
    assert region.uses == 0


async def test_a_target_that_is_too_small_is_refused() -> None:
    rig, region = Rig(), FakeRegion()
    for into in (region, [region[:50], region[50:]]):
        with pytest.raises(ValueError, match="101 bytes do not fit into the memory to read into"):
            rig.sinks(into, 101)
    assert region.uses == 0


async def test_too_many_pieces_to_read_into_are_refused() -> None:
    rig, region = Rig(max_sge=3), FakeRegion()
    parts = [region[start : start + 10] for start in (0, 20, 40, 60)]
    with pytest.raises(ValueError, match="4 pieces of memory in one request; max_sge is 3"):
        rig.sinks(parts, 40)
    assert region.uses == 0
    [sgl] = rig.sinks(parts, 30)  # pieces that are not needed do not count
    sgl.release()


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_an_unusable_target_is_refused_and_the_rest_released(
    at_once: int,
) -> None:
    rig, region = Rig(), FakeRegion(10, 1)
    readable = FakeRegion(10, 2, access=AccessFlags.REMOTE_READ)
    elsewhere = FakeRegion(10, 3, ELSEWHERE)
    closed = FakeRegion(10, 4)
    closed.close()
    for bad, why in (
        (readable, "must be registered with .*LOCAL_WRITE"),
        (elsewhere, "registered on another device"),
        (closed, "closed"),
    ):
        with pytest.raises(ValueError, match=why):
            rig.sinks([region, region[:5], bad], 25, at_once)
        assert (region.uses, bad.uses) == (0, 0)


async def test_a_target_needs_all_access_flags() -> None:
    rig, needed = Rig(), AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    with pytest.raises(ValueError, match="REMOTE_WRITE"):
        rig.builder.sinks(FakeRegion(), 10, needed, 1)
    [sgl] = rig.builder.sinks(FakeRegion(access=needed), 10, needed, 1)
    sgl.release()
