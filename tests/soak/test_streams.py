"""Byte streams with random sizes and options, used in both directions at once, until a time limit.

Receives are cancelled, and streams end by half close, close or abort. The received bytes must be a
prefix of the bytes sent. They must be complete unless a stream was closed or aborted early.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from campaign import Campaign
from helpers import TIME_LIMIT
from streaming import StreamPair, pattern, streaming

from aiordma import ByteStream, RdmaError, StreamOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio


def some_options(chance: random.Random) -> StreamOptions:
    """Return random options."""
    return StreamOptions(
        send_buffer=chance.choice([2048, 10_000, 1 << 18]),
        recv_buffer=chance.choice([2048, 10_001, 1 << 18]),
        send_depth=chance.choice([16, 128]),
        recv_depth=chance.choice([16, 256]),
        max_inline=chance.choice([0, 64]),
    )


async def send(stream: ByteStream, data: bytes, chance: random.Random) -> None:
    """Send data in pieces of random sizes, then the end of the stream."""
    at = 0
    while at < len(data):
        part = data[at : at + chance.choice([1, 63, 1000, 5000, 100_000])]
        await stream.send(part)
        at += len(part)
    await stream.send_eof()


async def receive(stream: ByteStream, into: bytearray, chance: random.Random) -> None:
    """Receive until the end of the stream, and cancel some of the receives."""
    while True:
        receiving = asyncio.create_task(stream.receive(chance.choice([1, 100, 4096, 1 << 20])))
        if chance.random() < 0.05:
            await asyncio.sleep(0)
            receiving.cancel()
        try:
            data = await receiving
        except asyncio.CancelledError:
            continue
        if not data:
            return
        into += data


async def exchange(pair: StreamPair, chance: random.Random, figures: Counter[str]) -> None:
    """Send in both directions. Sometimes one end closes or aborts before all is sent."""
    ends = [pair.client, pair.server]
    sent = [pattern(chance.choice([10, 1000, 300_000]), chance.randrange(1 << 20)) for _ in ends]
    received = [bytearray(), bytearray()]
    tasks = []
    for end, data, into in zip(ends, sent, received, strict=True):
        tasks.append(asyncio.create_task(send(end, data, chance)))
        tasks.append(asyncio.create_task(receive(end, into, chance)))
    ends_early = chance.random() < 0.3
    if ends_early:
        await asyncio.sleep(chance.random() * 0.1)
        end = chance.choice(ends)
        if chance.random() < 0.5:
            end.abort()
        else:
            await end.aclose()
        figures["ended early"] += 1
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if result is not None and not (ends_early and isinstance(result, RdmaError)):
            raise result
    for data, into in zip(sent, reversed(received), strict=True):
        assert data.startswith(into), "the received bytes differ from those sent"
        assert ends_early or len(into) == len(data)
        figures["bytes"] += len(into)


async def test_streams_with_random_options_and_ends(
    address: DeviceAddress, campaign: Campaign
) -> None:
    chance = campaign.chance
    for _ in campaign.rounds():
        async with (
            asyncio.timeout(TIME_LIMIT),
            streaming(address, some_options(chance), some_options(chance)) as pair,
        ):
            await exchange(pair, chance, campaign.figures)
