"""Gatherer: pieces of memory as segments of a request, lent to the device and given back."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
from collections.abc import Callable
from typing import Any

import pytest
from qp_fakes import (
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

COPY, COPY_KEY = 0x1000, 99  # of the pool's buffers
WRITABLE = AccessFlags.LOCAL_WRITE
ROOM = 1 << 20


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_double))


class Rig(SendRig):
    """A Gatherer whose copies go to the buffers of a FakePool."""

    def __init__(self, free_buffers: int = 1, max_sge: int = 4) -> None:
        super().__init__(free_buffers)
        self.gatherer = ScatterGatherBuilder(self.queue, max_sge, call_at_once)
        self.gatherer.pd = HERE

    async def sources(self, data: Any, room: int = ROOM) -> ScatterGatherList:
        return await self.gatherer.sources(data, room, "the room")

    async def copied(self, data: Any) -> bytes:
        """What the device would read of a source that is copied whole."""
        gathered = await self.sources(data)
        assert gathered._buffer is not None
        [(address, length, lkey)] = gathered.segments
        assert (address, lkey, length) == (COPY, COPY_KEY, gathered.nbytes)
        copy = bytes(gathered._buffer.view[:length])
        gathered.release()
        assert self.pool.is_whole
        return copy

    def sinks(self, into: Any, nbytes: int, at_once: int = 30) -> list[ScatterGatherList]:
        return [*self.gatherer.sinks(into, nbytes, WRITABLE, at_once)]


# --- what is registered, and what is not ---


async def test_what_is_registered() -> None:
    region = FakeRegion()
    some: list[Any] = [region, region[:5], [region], (region[:5],), [b"a", region], [region, b"a"]]
    none: list[Any] = [b"a", bytearray(b"a"), [], [b"a", b"b"], memoryview(region), (b"a",)]
    assert [is_registered(data) for data in some] == [True] * len(some)
    assert [is_registered(data) for data in none] == [False] * len(none)


async def test_a_message_of_pieces_is_joined() -> None:
    numbers = array.array("h", [1, 2])
    grid = memoryview(bytes(range(8))).cast("B", [2, 2, 2])
    assert bytes(join_buffers([])) == b""
    assert bytes(join_buffers([b"", b""])) == b""
    assert bytes(join_buffers([b"one", bytearray(b"two"), memoryview(b"three")])) == b"onetwothree"
    assert bytes(join_buffers((numbers, b"!"))) == numbers.tobytes() + b"!"
    assert bytes(join_buffers([grid, memoryview(b"abcdef")[::2]])) == bytes(range(8)) + b"ace"
    assert len(join_buffers(numbers)) == 4


async def test_a_buffer_that_is_alone_is_held_and_not_copied() -> None:
    memory = bytearray(b"hello")
    view = join_buffers(memory)
    memory[0] = ord("j")
    assert bytes(view) == b"jello"
    with pytest.raises(BufferError):
        memory.append(0)
    view.release()
    memory.append(0)


async def test_pieces_that_were_joined_are_not_held() -> None:
    memory = bytearray(b"hello")
    assert bytes(join_buffers([memory, b"!"])) == b"hello!"
    memory.append(0)


# --- what to send ---


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: (one,)])
async def test_registered_memory_is_lent_as_it_is(wrap: Callable[[object], object]) -> None:
    rig, region = Rig(), FakeRegion(100)
    gathered = await rig.sources(wrap(region))
    assert gathered.segments == [(0x10000, 100, 11)]
    assert (gathered.nbytes, region.uses) == (100, 1)
    gathered.release()
    assert region.uses == 0
    part = await rig.sources(wrap(region[10:30]))
    assert part.segments == [(0x1000A, 20, 11)]
    assert (part.nbytes, region.uses) == (20, 1)
    part.release()
    part.release()
    assert region.uses == 0
    assert len(rig.pool.home) == 1


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


async def test_copies_are_made_at_once_and_nothing_is_held() -> None:
    rig, memory = Rig(), bytearray(b"hello")
    gathered = await rig.sources([memory, b"!"])
    memory.clear()
    assert gathered._buffer is not None
    assert bytes(gathered._buffer.view[:6]) == b"hello!"
    gathered.release()


async def test_copies_that_follow_each_other_are_one_segment() -> None:
    rig, region = Rig(), FakeRegion()
    gathered = await rig.sources([b"head", b"er", region[:10], b"tr", b"ail", b"er"])
    assert gathered.segments == [
        (COPY, 6, COPY_KEY),
        (0x10000, 10, 11),
        (COPY + 6, 7, COPY_KEY),
    ]
    assert gathered.nbytes == 23
    assert gathered._buffer is not None
    assert bytes(gathered._buffer.view[:13]) == b"headertrailer"
    assert len(rig.pool.home) == 0
    gathered.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_parts_that_lie_side_by_side_are_one_segment() -> None:
    rig, first, second = Rig(), FakeRegion(100, 1), FakeRegion(100, 2)
    gathered = await rig.sources([first[:10], first[10:30], first[40:50], first[30:40], second])
    assert gathered.segments == [
        (0x10000, 30, 11),
        (0x10000 + 40, 10, 11),
        (0x10000 + 30, 10, 11),
        (0x20000, 100, 12),
    ]
    assert (first.uses, second.uses) == (4, 1)
    gathered.release()
    assert (first.uses, second.uses) == (0, 0)


async def test_neighbours_of_another_key_are_segments_of_their_own() -> None:
    rig, first = Rig(), FakeRegion(0x10000, 1)
    second = FakeRegion(100, 2)
    assert first.addr + len(first) == second.addr
    gathered = await rig.sources([first, second])
    assert gathered.segments == [(0x10000, 0x10000, 11), (0x20000, 100, 12)]
    gathered.release()


async def test_what_is_released_twice_comes_back_once() -> None:
    rig, region = Rig(), FakeRegion()
    gathered = await rig.sources([region, b"copy"])
    for _ in range(2):
        gathered.release()
        assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_empty_pieces_are_no_segments() -> None:
    rig, region = Rig(), FakeRegion()
    gathered = await rig.sources([b"", region[:0], b"a", region[5:5], b"", region[:10], b""])
    assert gathered.segments == [(COPY, 1, COPY_KEY), (0x10000, 10, 11)]
    assert gathered.nbytes == 11
    gathered.release()
    assert (region.uses, rig.pool.is_whole) == (0, True)


@pytest.mark.parametrize("data", [b"", [], [b"", b""], (bytearray(),)])
async def test_nothing_needs_no_buffer(data: Any) -> None:
    rig = Rig(free_buffers=0)
    gathered = await rig.sources(data)
    assert (gathered.segments, gathered.nbytes) == ([], 0)
    assert rig.pool.asked == []
    gathered.release()


async def test_empty_copies_beside_registered_memory_need_no_buffer() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    gathered = await rig.sources([b"", region, b""])
    assert gathered.segments == [(0x10000, 100, 11)]
    assert rig.pool.asked == []
    gathered.release()
    assert region.uses == 0


async def test_what_just_fits_is_taken() -> None:
    rig, region = Rig(), FakeRegion()
    gathered = await rig.sources([b"ab", region], 102)
    assert gathered.nbytes == 102
    gathered.release()


@pytest.mark.parametrize("with_registered", [False, True])
async def test_what_does_not_fit_is_refused(with_registered: bool) -> None:
    rig, region = Rig(), FakeRegion()
    data = [b"ab", region] if with_registered else [b"ab", bytes(100)]
    with pytest.raises(ValueError, match="102 bytes do not fit into the room of 101"):
        await rig.sources(data, 101)
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_too_many_pieces_are_refused_and_given_back() -> None:
    rig, region = Rig(max_sge=3), FakeRegion()
    for parts in ([region[n : n + 1] for n in (0, 2, 4, 6)], [b"a", region[:1], b"b", region[2:3]]):
        with pytest.raises(ValueError, match="4 pieces of memory in one request; max_sge is 3"):
            await rig.sources(parts)
        assert (region.uses, rig.pool.is_whole) == (0, True)
    gathered = await rig.sources([region[n : n + 1] for n in (0, 1, 2, 3, 5, 7)])
    assert len(gathered.segments) == 3  # those that lie side by side count once
    gathered.release()


@pytest.mark.parametrize("pd", [ELSEWHERE, None])
async def test_memory_registered_elsewhere_is_refused_and_the_rest_given_back(pd: Any) -> None:
    rig, region, other = Rig(), FakeRegion(100, 1), FakeRegion(100, 2, pd)
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.sources([b"copy", region, other, region])
    assert (region.uses, other.uses, rig.pool.is_whole) == (0, 0, True)


async def test_before_there_is_a_queue_pair_all_memory_is_elsewhere() -> None:
    rig, region = Rig(), FakeRegion()
    rig.gatherer.pd = None
    with pytest.raises(ValueError, match="registered on another device"):
        await rig.sources(region)
    assert region.uses == 0


async def test_closed_memory_is_refused_and_the_rest_given_back() -> None:
    rig, region, closed = Rig(), FakeRegion(100, 1), FakeRegion(100, 2)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        await rig.sources([b"copy", region, closed[:5]])
    assert (region.uses, closed.uses, rig.pool.is_whole) == (0, 0, True)


async def test_what_is_lent_is_not_disposed_of_before_it_is_given_back() -> None:
    rig, region = Rig(), FakeRegion()
    gathered = await rig.sources([region, region[:5]])
    region.close()
    assert memoryview(region)
    gathered.release()
    with pytest.raises(BufferError):
        memoryview(region)


async def test_a_piece_that_is_no_memory_is_refused() -> None:
    rig, region = Rig(), FakeRegion()
    things: list[Any] = ["text", [region, "text"], [region, [b"nested"]]]
    for thing in things:
        with pytest.raises(TypeError):
            await rig.sources(thing)
    assert (region.uses, rig.pool.is_whole) == (0, True)


async def test_copies_for_which_there_is_no_memory_lend_nothing() -> None:
    async def fail(function: Callable[[], None]) -> None:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.gatherer.call_in_worker = fail
    with pytest.raises(VerbsError, match="ibv_reg_mr"):
        await rig.sources([region, b"copy"])
    assert region.uses == 0


async def test_a_buffer_for_copies_is_waited_for() -> None:
    rig, region = Rig(free_buffers=0), FakeRegion()
    gathered = await rig.sources([b"co", region, b"py"])
    assert rig.pool.asked == [(4, call_at_once)]
    assert len(gathered.segments) == 3
    gathered.release()
    assert rig.pool.is_whole


async def test_cancelling_while_a_buffer_is_waited_for_lends_nothing() -> None:
    async def never(function: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    rig, region = Rig(free_buffers=0), FakeRegion()
    rig.gatherer.call_in_worker = never
    task = asyncio.create_task(rig.sources([region, b"copy"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert region.uses == 0


async def test_a_copy_as_long_as_its_buffer() -> None:
    data = bytes(range(256)) * (BUFFER_SIZE // 256)
    assert await Rig().copied([data[:100], data[100:]]) == data


# --- where to read into ---


async def test_one_region_takes_all() -> None:
    rig, region = Rig(), FakeRegion(100)
    [gathered] = rig.sinks(region, 40)
    assert (gathered.segments, gathered.nbytes) == ([(0x10000, 40, 11)], 40)
    assert region.uses == 1
    gathered.release()
    [gathered] = rig.sinks(region[20:], 80)
    assert gathered.segments == [(0x10000 + 20, 80, 11)]
    gathered.release()
    assert region.uses == 0


async def test_pieces_are_filled_in_their_order_and_the_rest_left_alone() -> None:
    rig, first, second, third = Rig(), *(FakeRegion(100, number) for number in (1, 2, 3))
    [gathered] = rig.sinks([second[50:], first[:0], first, third], 90)
    assert gathered.segments == [(0x20000 + 50, 50, 12), (0x10000, 40, 11)]
    assert (first.uses, second.uses, third.uses) == (1, 1, 0)
    gathered.release()
    assert (first.uses, second.uses) == (0, 0)


@pytest.mark.parametrize(("at_once", "shape"), [(1, [1] * 4), (2, [2, 2]), (3, [3, 1]), (4, [4])])
async def test_reads_are_split_by_what_the_device_scatters_at_once(
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


async def test_nothing_to_read_is_no_request() -> None:
    rig, region = Rig(), FakeRegion()
    assert rig.sinks(region, 0) == rig.sinks([], 0) == []
    assert region.uses == 0


async def test_what_cannot_take_all_is_refused() -> None:
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
    [gathered] = rig.sinks(parts, 30)  # pieces that are not needed do not count
    gathered.release()


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_memory_that_cannot_be_read_into_is_refused_and_the_rest_given_back(
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


async def test_all_of_the_access_that_is_needed_must_be_there() -> None:
    rig, needed = Rig(), AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    with pytest.raises(ValueError, match="REMOTE_WRITE"):
        rig.gatherer.sinks(FakeRegion(), 10, needed, 1)
    [gathered] = rig.gatherer.sinks(FakeRegion(access=needed), 10, needed, 1)
    gathered.release()
