"""ScatterGatherBuilder: pieces of memory as segments of a request, acquired and released."""

from __future__ import annotations

import array
import contextlib
import ctypes
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from simulator import Simulation
from simulator.pairs import connected

from aiordma import AccessFlags, ConnectionOptions, MemoryRegion
from aiordma.qp import is_registered, join_buffers
from aiordma.qp.scatter_gather import ScatterGatherList

ROOM = 1 << 20
LOCAL = AccessFlags.LOCAL_WRITE


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_double))


class Builder:
    """The ScatterGatherBuilder of a connection with a max_sge of 3, and a region of 100 bytes."""

    def __init__(self, pair: Any, region: MemoryRegion) -> None:
        self.near, self.far = pair.near, pair.far
        self.connection = pair.near.connection
        self.builder = pair.near.data_path._builder
        self.region = region

    async def sources(self, data: Any, room: int = ROOM) -> ScatterGatherList:
        sgl: ScatterGatherList = await self.builder.sources(data, room, "the room")
        return sgl

    async def copied(self, data: Any) -> bytes:
        """Return the bytes that the device would read. All data must be copied."""
        sgl = await self.sources(data)
        assert sgl._buffer is not None
        assert sgl.segments == [(sgl._buffer.address, sgl.nbytes, sgl._buffer.lkey)]
        copy = bytes(sgl._buffer.view[: sgl.nbytes])
        sgl.release()
        assert self.is_released
        return copy

    def sinks(self, into: Any, nbytes: int, max_pieces: int = 30) -> list[ScatterGatherList]:
        return [*self.builder.sinks(into, nbytes, LOCAL, max_pieces)]

    def segments_of(self, *parts: tuple[int, int]) -> list[tuple[int, int, int]]:
        """Return segments of the region: offset and length."""
        return [(self.region.addr + start, nbytes, self.region.lkey) for start, nbytes in parts]

    @property
    def is_released(self) -> bool:
        """True if no request uses memory."""
        return self.region.references.count == 0 and self.near.pool_is_whole


@contextlib.asynccontextmanager
async def builder_of(simulation: Simulation) -> AsyncIterator[Builder]:
    """Connect a pair, and return the builder of its near end."""
    async with connected(simulation, ConnectionOptions(max_sge=3)) as pair:
        region = await pair.near.connection.allocate(100, LOCAL)
        yield Builder(pair, region)
        region.close()


# --- registered or not ---


async def test_is_registered(simulation: Simulation) -> None:
    async with builder_of(simulation) as b:
        region = b.region
        some: list[Any] = [region, region[:5], [region], (region[:5],), [b"a", region]]
        none: list[Any] = [b"a", bytearray(b"a"), [], [b"a", b"b"], memoryview(region), (b"a",)]
        assert [is_registered(data) for data in some] == [True] * len(some)
        assert [is_registered(data) for data in none] == [False] * len(none)


def test_join_buffers_joins_pieces_and_copies_no_single_buffer() -> None:
    numbers = array.array("h", [1, 2])
    grid = memoryview(bytes(range(8))).cast("B", [2, 2, 2])
    memory = bytearray(b"hello")
    assert bytes(join_buffers([])) == bytes(join_buffers([b"", b""])) == b""
    assert bytes(join_buffers([b"one", memory, memoryview(b"three")])) == b"onehellothree"
    assert bytes(join_buffers((numbers, b"!"))) == numbers.tobytes() + b"!"
    assert bytes(join_buffers([grid, memoryview(b"abcdef")[::2]])) == bytes(range(8)) + b"ace"
    assert len(join_buffers(numbers)) == 4
    memory.append(ord("!"))  # the joined pieces keep no reference
    view = join_buffers(memory)
    memory[0] = ord("j")
    assert bytes(view) == b"jello!"
    with pytest.raises(BufferError):
        memory.append(0)
    view.release()
    memory.append(0)


# --- sources: memory to send or write ---


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: (one,)])
async def test_registered_memory_is_not_copied(
    simulation: Simulation, wrap: Callable[[object], object]
) -> None:
    async with builder_of(simulation) as b:
        for memory, part in ((b.region, (0, 100)), (b.region[10:30], (10, 20))):
            sgl = await b.sources(wrap(memory))
            assert (sgl.segments, sgl.nbytes) == (b.segments_of(part), part[1])
            assert b.region.references.count == 1
            for _ in range(2):
                sgl.release()
                assert b.is_released


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
        bytes(range(256)) * 4,
    ],
    ids=lambda data: memoryview(data).format,
)
async def test_other_memory_is_copied(simulation: Simulation, data: Any) -> None:
    async with builder_of(simulation) as b:
        expected = memoryview(data).tobytes()
        assert await b.copied(data) == expected
        assert await b.copied([b"<", data, b">"]) == b"<" + expected + b">"


async def test_adjacent_pieces_are_one_segment(simulation: Simulation) -> None:
    async with builder_of(simulation) as b:
        region, memory = b.region, bytearray(b"head")
        sgl = await b.sources([memory, b"er", region[:10], region[10:30], b"tr", b"", b"ail"])
        memory.clear()  # it is copied
        buffer = sgl._buffer
        assert buffer is not None
        head, tail = (buffer.address, 6, buffer.lkey), (buffer.address + 6, 5, buffer.lkey)
        assert sgl.segments == [head, *b.segments_of((0, 30)), tail]
        assert (sgl.nbytes, bytes(buffer.view[:11])) == (41, b"headertrail")
        sgl.release()
        sgl = await b.sources([region[40:50], region[:0], region[30:40], region[5:5], region[40:]])
        assert sgl.segments == b.segments_of((40, 10), (30, 70))
        sgl.release()
        assert b.is_released


def test_adjacent_memory_with_different_keys_is_two_segments() -> None:
    sgl = ScatterGatherList()
    for address, lkey in ((0, 1), (10, 2)):
        sgl._add_segment(address, 10, lkey)
    assert sgl.segments == [(0, 10, 1), (10, 10, 2)]


@pytest.mark.parametrize("data", [b"", [], [b"", b""], (bytearray(),)])
async def test_empty_data_needs_no_buffer(simulation: Simulation, data: Any) -> None:
    async with builder_of(simulation) as b:
        for pieces, count in ((data, 0), ([*data, b.region, b""], 1)):
            sgl = await b.sources(pieces)
            assert (len(sgl.segments), sgl._buffer) == (count, None)
            sgl.release()
        assert simulation.world.calls.counts["ibv_reg_mr_iova2"] == 3  # two rings, one region


async def test_unusable_data_is_refused_and_the_rest_released(simulation: Simulation) -> None:
    async with builder_of(simulation) as b:
        region = b.region
        closed = await b.connection.allocate(10, LOCAL)
        closed.close()
        async with await b.far.connection.allocate(10, LOCAL) as elsewhere:
            cases: list[tuple[Any, int, type[Exception], str]] = [
                ([b"ab", region], 101, ValueError, "102 bytes do not fit into the room of 101"),
                ([b"ab", bytes(100)], 101, ValueError, "102 bytes do not fit into the room of 101"),
                ([region[n : n + 1] for n in (0, 2, 4, 6)], 99, ValueError, "4 pieces .* is 3"),
                ([b"a", region[:1], b"b", region[2:3]], 99, ValueError, "4 pieces of memory"),
                ([b"copy", region, elsewhere, region], 999, ValueError, "on another device"),
                ([b"copy", region, closed[:5]], 999, ValueError, "closed"),
                ("text", 99, TypeError, ""),
                ([region, "text"], 999, TypeError, ""),
                ([region, [b"nested"]], 999, TypeError, ""),
            ]
            for data, room, error, why in cases:
                with pytest.raises(error, match=why or None):
                    await b.sources(data, room)
                assert b.is_released
        sgl = await b.sources([region[n : n + 1] for n in (0, 1, 2, 3, 5, 7)], 6)
        assert len(sgl.segments) == 3  # adjacent pieces count once
        b.builder.pd = None  # without a queue pair
        with pytest.raises(ValueError, match="registered on another device"):
            await b.sources(region)
        sgl.release()


# --- sinks: memory to read into ---


@pytest.mark.parametrize(("at_once", "shape"), [(1, [1] * 3), (2, [2, 1]), (3, [3])])
async def test_reads_are_split_by_the_number_of_pieces_at_once(
    simulation: Simulation, at_once: int, shape: list[int]
) -> None:
    async with builder_of(simulation) as b:
        parts = [b.region[start : start + 10] for start in (20, 0, 60, 80)]
        requests = b.sinks([parts[0], b.region[:0], *parts[1:]], 25, at_once)
        assert [len(one.segments) for one in requests] == shape
        segments = [segment for one in requests for segment in one.segments]
        assert segments == b.segments_of((20, 10), (0, 10), (60, 5))  # the rest is not used
        assert (sum(one.nbytes for one in requests), b.region.references.count) == (25, 3)
        for one in requests:
            one.release()
        assert b.is_released
        assert b.sinks(b.region, 0) == b.sinks([], 0) == []


async def test_an_unusable_target_is_refused_and_the_rest_released(
    simulation: Simulation,
) -> None:
    async with builder_of(simulation) as b:
        region, connection = b.region, b.connection
        closed = await connection.allocate(10, LOCAL)
        closed.close()
        readable = await connection.allocate(10, AccessFlags.REMOTE_READ)
        elsewhere = await b.far.connection.allocate(10, LOCAL)
        parts = [region[start : start + 10] for start in (0, 20, 40, 60)]
        cases: list[tuple[Any, int, str]] = [
            (region, 101, "101 bytes do not fit into the memory to read into of 100"),
            ([region[:50], region[50:]], 101, "101 bytes do not fit into the memory"),
            (parts, 40, "4 pieces of memory in one request; max_sge is 3"),
            ([region, region[:5], readable], 115, "must be registered with .*LOCAL_WRITE"),
            ([region, region[:5], elsewhere], 115, "registered on another device"),
            ([region, region[:5], closed], 115, "closed"),
        ]
        for into, nbytes, why in cases:
            for at_once in (1, 3):
                with pytest.raises(ValueError, match=why):
                    b.sinks(into, nbytes, at_once)
                assert b.is_released
        for one in b.sinks(parts, 30):  # pieces that are not needed do not count
            one.release()
        readable.close()
        elsewhere.close()
