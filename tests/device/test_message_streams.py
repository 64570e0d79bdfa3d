"""Message streams on real devices: messages of all sizes arrive whole, also to a slow reader."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
from streaming import message_streams, pattern

import aiordma
from aiordma import PeerClosed
from aiordma.message_streams.rendezvous import PIECE
from aiordma.rdmacm import DeviceAddress


async def test_messages_of_all_sizes_both_ways(any_address: DeviceAddress) -> None:
    async with message_streams(any_address) as (near, far):
        for size in (0, 1, 4000, 4088, 4089, 1 << 16, PIECE + 1):
            frames = [pattern(size, seed=size), b"", b"the last"]
            for source, sink in ((near, far), (far, near)):
                sending = loops.create_task(source.send(frames))
                with await sink.recv_message() as message:
                    assert [bytes(frame) for frame in message.frames] == frames
                await sending


async def test_large_messages_move_without_a_copy(address: DeviceAddress) -> None:
    data = pattern(1 << 20)
    async with message_streams(address) as (near, far):
        sending = [loops.create_task(near.send([data, data[:10]])) for _ in range(3)]

        def allocate(sizes: Sequence[int]) -> list[bytearray]:
            return [bytearray(size) for size in sizes]

        assert await far.recv_frames(allocate) == [data, data[:10]]
        region = await far.allocate(2 << 20, far.read_access)
        assert await far.recv_into(region) == len(data) + 10
        assert bytes(memoryview(region)[: len(data) + 10]) == data + data[:10]
        assert await far.recv() == data + data[:10]
        await loops.gather(*sending)


async def test_arrays_and_mapped_files_go_and_come_as_they_are(
    address: DeviceAddress, tmp_path: Path
) -> None:
    array = np.arange(60_000, dtype=np.float64).reshape(60, 1000)
    data = pattern(300_000)
    (tmp_path / "data").write_bytes(data)

    def allocate(sizes: Sequence[int]) -> list[Any]:
        assert sizes == (array.nbytes, len(data))
        return [np.empty_like(array), mmap.mmap(-1, sizes[1])]

    with (tmp_path / "data").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # all kernels pin it
    async with message_streams(address) as (near, far):
        # numpy declares its arrays to be buffers only from Python 3.12 on: hence Any.
        frames: list[Any] = [array, mapped]
        sending = loops.create_task(near.send(frames))
        received: Sequence[Any] = await far.recv_frames(allocate)
        await sending
        assert np.array_equal(received[0], array)
        assert received[1][:] == data
        assert (near.stats.bytes_copied, far.stats.bytes_copied) == (0, 0)


async def test_a_slow_reader_holds_its_peer_back(address: DeviceAddress) -> None:
    """A burst of messages to a peer that does not receive ends a Connection on iWARP."""
    async with message_streams(address) as (near, far):
        sending = [loops.create_task(near.send(b"%d" % index)) for index in range(100)]
        assert {await far.recv() for _ in sending} == {b"%d" % index for index in range(100)}
        await loops.gather(*sending)
        await near.send_eof()
        assert [message async for message in far] == []


async def test_a_peer_that_goes_ends_a_rendezvous(address: DeviceAddress) -> None:
    async with message_streams(address) as (near, far):
        sending = loops.create_task(near.send(bytes(1 << 20)))
        await loops.until(lambda: far._connection.stats.messages_unread, "the announcement")
        far.abort()
        with pytest.raises(PeerClosed):
            await sending
        with pytest.raises(aiordma.LocalClosed):
            await far.recv()
