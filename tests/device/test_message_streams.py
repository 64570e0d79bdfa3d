"""Message streams on real devices: messages of all sizes arrive whole, also to a slow reader."""

from __future__ import annotations

from collections.abc import Sequence

import loops
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
