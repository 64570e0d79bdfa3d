"""Byte streams until time is up: random sizes and options, both ways at once, cancelled receives,
half closes, and ends of every kind. What came must be the beginning of what was sent, and all of it
where nobody was in a hurry."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from campaign import until_time_is_up
from helpers import PATIENCE
from streaming import StreamPair, pattern, streaming

from aiordma import ByteStream, RdmaError, StreamOptions
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio


def some_options(chance: random.Random) -> StreamOptions:
    return StreamOptions(
        send_buffer=chance.choice([2048, 10_000, 1 << 18]),
        recv_buffer=chance.choice([2048, 10_001, 1 << 18]),
        send_depth=chance.choice([16, 128]),
        recv_depth=chance.choice([16, 256]),
        max_inline=chance.choice([0, 64]),
    )


async def send(stream: ByteStream, data: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(data):
        part = data[at : at + chance.choice([1, 63, 1000, 5000, 100_000])]
        await stream.send(part)
        at += len(part)
    await stream.send_eof()


async def receive(stream: ByteStream, into: bytearray, chance: random.Random) -> None:
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


async def talk(pair: StreamPair, chance: random.Random, figures: Counter[str]) -> None:
    """Both ways; now and then somebody leaves in the middle of it."""
    ends = [pair.client, pair.server]
    sent = [pattern(chance.choice([10, 1000, 300_000]), chance.randrange(1 << 20)) for _ in ends]
    came = [bytearray(), bytearray()]
    tasks = [
        asyncio.create_task(send(end, data, chance)) for end, data in zip(ends, sent, strict=True)
    ]
    tasks += [
        asyncio.create_task(receive(end, into, chance))
        for end, into in zip(ends, came, strict=True)
    ]
    leaves = chance.random() < 0.3
    if leaves:
        await asyncio.sleep(chance.random() * 0.1)
        end = chance.choice(ends)
        if chance.random() < 0.5:
            end.abort()
        else:
            await end.aclose()
        figures["left"] += 1
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if result is not None and not (leaves and isinstance(result, RdmaError)):
            raise result
    for data, into in zip(sent, reversed(came), strict=True):
        assert data.startswith(into), "other bytes came than were sent"
        assert leaves or len(into) == len(data)
        figures["bytes"] += len(into)


async def test_streams_of_every_kind(address: DeviceAddress) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    print(f"streams on {address.device}: seed {seed}", flush=True)
    figures: Counter[str] = Counter()
    for _ in until_time_is_up(f"streams on {address.device}", figures):
        async with (
            asyncio.timeout(PATIENCE),
            streaming(address, some_options(chance), some_options(chance)) as pair,
        ):
            await talk(pair, chance, figures)
        figures["streams"] += 1
