"""A peer of a message stream that breaks the protocol ends the stream, with a typed error."""

from __future__ import annotations

import random

import loops
import machine
import pytest
from broken_messages import random_message, raw_peer, wire, without_events
from streaming import message_streams

import aiordma
from aiordma import ConnectionClosed, LocalClosed, PeerClosed, ProtocolError, WorkRequestError
from aiordma.message_streams.wire import Kind
from aiordma.rdmacm import DeviceAddress

# The simulated devices take a fraction of the time, so they run more seeds.
SEEDS = 5 if machine.simulated is None else 200


@pytest.mark.loops("asyncio")
async def test_a_peer_that_breaks_the_protocol_ends_the_stream(address: DeviceAddress) -> None:
    for messages, text in without_events():
        async with raw_peer(address) as (raw, stream):
            for message in messages:
                await raw.send(message)
            with pytest.raises(ProtocolError, match=text):
                await stream.recv()
            assert stream.closed
            with pytest.raises(ProtocolError, match=text):
                await stream.send(b"x")
            with pytest.raises(ProtocolError, match=text):
                await stream.recv_message()
            with pytest.raises(PeerClosed):
                await raw.recv()


@pytest.mark.loops("asyncio")
async def test_memory_that_cannot_be_read_ends_the_stream(address: DeviceAddress) -> None:
    number, entry = bytes(8), (10).to_bytes(8) + bytes(8) + (30).to_bytes(4) + bytes(4)
    async with raw_peer(address) as (raw, stream):
        await raw.send(wire(Kind.ANNOUNCE, number + entry, count=1))
        with pytest.raises((WorkRequestError, PeerClosed)):  # iWARP ends the connection first
            await stream.recv()
        assert stream.closed


@pytest.mark.loops("asyncio")
async def test_random_wire_messages_end_in_a_typed_error(address: DeviceAddress) -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed)
        async with raw_peer(address) as (raw, stream):

            async def receive() -> None:
                while True:
                    await stream.recv()

            receiving = loops.create_task(receive())
            for _ in range(8):
                try:
                    await raw.send(random_message(chance))
                except ConnectionClosed:
                    break
            await raw.aclose()
            with pytest.raises((ProtocolError, ConnectionClosed, WorkRequestError)) as failure:
                await receiving
            assert not isinstance(failure.value, LocalClosed), seed
    async with message_streams(address) as (near, far):
        await near.send(b"the service goes on")
        assert await far.recv() == b"the service goes on"


async def test_all_messages_of_a_peer_that_has_gone_are_received(address: DeviceAddress) -> None:
    """A failing send ends the sending, and the messages that have arrived are still there."""
    async with message_streams(address) as (near, far):
        for number in range(3):
            await near.send([b"%d" % number, b""])
        await near.aclose()
        await loops.until(lambda: far.closed, "the peer's end to be noticed")
        with pytest.raises(PeerClosed):
            await far.send(b"x")
        with await far.recv_message() as message:
            assert [bytes(frame) for frame in message.frames] == [b"0", b""]
        assert [await far.recv() for _ in range(2)] == [b"1", b"2"]
        with pytest.raises(aiordma.PeerClosed):
            await far.recv()
