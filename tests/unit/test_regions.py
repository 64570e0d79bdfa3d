"""MemoryRegion, MemorySlice and RemoteBuffer, without a device."""

from __future__ import annotations

import array
import copy
import gc
import pickle

import pytest

from aiordma import AccessFlags, MemoryRegion, RemoteBuffer


class FakeRegistration:
    def __init__(self, buffer: bytearray | array.array[float]) -> None:
        self.address, self.lkey, self.rkey = 0x10000, 5, 6
        self.length = memoryview(buffer).nbytes


@pytest.fixture
def disposed() -> list[object]:
    return []


def region_of(buffer: bytearray | array.array[float], disposed: list[object]) -> MemoryRegion:
    registration = FakeRegistration(buffer)
    access = AccessFlags.LOCAL_WRITE
    return MemoryRegion(registration, buffer, access, disposed.append)  # type: ignore[arg-type]


def test_a_region_is_the_buffer_itself(disposed: list[object]) -> None:
    memory = bytearray(b"0123456789")
    region = region_of(memory, disposed)
    view = memoryview(region)
    view[0] = ord("x")
    assert memory == b"x123456789"
    assert (len(region), region.addr, region.lkey, region.rkey) == (10, 0x10000, 5, 6)
    with pytest.raises(BufferError):
        memory.append(1)


def test_a_region_counts_bytes_whatever_the_items_are(disposed: list[object]) -> None:
    region = region_of(array.array("d", [1.0, 2.0]), disposed)
    assert len(region) == 16
    assert memoryview(region).format == "d"
    assert len(region[8:].view) == 8


def test_slices(disposed: list[object]) -> None:
    region = region_of(bytearray(range(100)), disposed)
    part = region[10:30]
    assert (part.addr, part.lkey, len(part)) == (0x1000A, 5, 20)
    assert bytes(part[5:7].view) == bytes([15, 16])
    assert (region[-10:].start, len(region[200:]), len(region[5:2])) == (90, 0, 0)
    assert part.remote == RemoteBuffer(0x1000A, 6, 20)
    assert region.remote[10:30] == part.remote
    with pytest.raises(ValueError, match="without a step"):
        region[::2]


def test_closing_waits_for_the_device(disposed: list[object]) -> None:
    memory = bytearray(10)
    region = region_of(memory, disposed)
    region.take()
    region.take()
    region.close()
    assert region.closed
    with pytest.raises(ValueError, match="closed"):
        region.take()
    region.give_back()
    assert disposed == []
    region.give_back()
    region.close()
    assert len(disposed) == 1
    with pytest.raises(BufferError, match="closed"):
        memoryview(region)
    memory.append(1)


def test_a_block_and_dropping_close_it(disposed: list[object]) -> None:
    with region_of(bytearray(1), disposed) as region:
        assert not region.closed
    assert len(disposed) == 1
    region_of(bytearray(1), disposed)
    gc.collect()
    assert len(disposed) == 2


def test_a_remote_buffer_travels() -> None:
    remote = RemoteBuffer((1 << 64) - 1, (1 << 32) - 1, 100)
    assert remote.pack() == b"\xff" * 12 + b"\0\0\0\x64"
    assert RemoteBuffer.unpack(remote.pack() + b"more") == remote
    assert pickle.loads(pickle.dumps(remote)) == copy.copy(remote) == remote
    assert remote[:10].length == 10
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        RemoteBuffer.unpack(bytes(15))
    with pytest.raises(ValueError, match="without a step"):
        remote[::2]


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, -1)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a number of"):
        RemoteBuffer(*numbers)
