"""ScatterGatherBuilder: pieces of memory as segments of a request, acquired and released."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from simulator import Simulation
from simulator.pairs import connected

from aiordma import AccessFlags, ConnectionOptions, MemoryRegion
from aiordma.qp import is_registered
from aiordma.qp.scatter_gather import ScatterGatherList

ROOM = 1 << 20
LOCAL = AccessFlags.LOCAL_WRITE


class Builder:
    """The ScatterGatherBuilder of a connection with a max_sge of 3, and a region of 100 bytes."""

    def __init__(self, pair: Any, region: MemoryRegion) -> None:
        self.near, self.far = pair.near, pair.far
        self.connection = pair.near.connection
        self.builder = pair.near.data_path.slow.builder
        self.region = region

    async def sources(self, data: Any, room: int = ROOM) -> ScatterGatherList:
        sgl: ScatterGatherList = await self.builder.sources(data, room, "the room")
        return sgl

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


async def test_adjacent_pieces_are_one_segment(simulation: Simulation) -> None:
    async with builder_of(simulation) as b:
        region, memory = b.region, bytearray(b"head")
        for data, is_some in ((region, True), ((region[:5],), True), ([], False), ((b"a",), False)):
            assert is_registered(data) is is_some
        for part in (region[10:30], [region[10:30]], (region[10:30],)):
            sgl = await b.sources(part)
            assert (sgl.segments, sgl.nbytes) == (b.segments_of((10, 20)), 20)
            assert region.references.count == 1
            for _ in range(2):
                sgl.release()
                assert b.is_released
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
    sgl = ScatterGatherList()
    for address, lkey in ((0, 1), (10, 2)):  # adjacent, with different keys
        sgl._add_segment(address, 10, lkey)
    assert sgl.segments == [(0, 10, 1), (10, 10, 2)]


async def test_unusable_data_is_refused(simulation: Simulation) -> None:
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
        sgl.release()


async def test_an_unusable_target_is_refused(simulation: Simulation) -> None:
    async with builder_of(simulation) as b:
        region = b.region
        async with (
            await b.connection.allocate(10, AccessFlags.REMOTE_READ) as readable,
            await b.far.connection.allocate(10, LOCAL) as elsewhere,
        ):
            parts = [region[start : start + 10] for start in (0, 20, 40, 60)]
            cases: list[tuple[Any, int, str]] = [
                (region, 101, "101 bytes do not fit into the memory to read into of 100"),
                ([region[:50], region[50:]], 101, "101 bytes do not fit into the memory"),
                (parts, 40, "4 pieces of memory in one request; max_sge is 3"),
                ([region, region[:5], readable], 115, "must be registered with .*LOCAL_WRITE"),
                ([region, region[:5], elsewhere], 115, "registered on another device"),
            ]
            for into, nbytes, why in cases:
                for at_once in (1, 3):
                    with pytest.raises(ValueError, match=why):
                        b.sinks(into, nbytes, at_once)
                    assert b.is_released
        (one,) = b.sinks([region[:0], *parts], 25)  # pieces that are not needed do not count
        assert one.segments == b.segments_of((0, 10), (20, 10), (40, 5))
        one.release()
        assert b.sinks(region, 0) == b.sinks([], 0) == []
