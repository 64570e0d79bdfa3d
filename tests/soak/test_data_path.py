"""Every await of the data path, cancelled at random under load, while the peer keeps writing.

Whatever a cancelled operation was using is freed at once, and its memory put to another use, whose
content must then stay as it is. What is not cancelled must be right, and no message lost.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import pytest
from campaign import finish, until_time_is_up
from helpers import PATIENCE, Pair, connected

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionClosed,
    ConnectionOptions,
    MemoryRegion,
    RegistrationCache,
    WorkRequestError,
)
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

OPTIONS = ConnectionOptions(
    send_depth=16, recv_depth=64, max_message_size=8192, initiator_depth=4, responder_resources=4
)
SHARED = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
LITTER = 0xAA
AREA = 8192
# iWARP has no flow control: so many messages may be on their way.
WINDOW = 24


def seal(number: int, payload: bytes) -> bytes:
    body = number.to_bytes(8, "big") + payload
    return zlib.crc32(body).to_bytes(4, "big") + body


def unseal(message: bytes) -> int:
    assert zlib.crc32(message[4:]) == int.from_bytes(message[:4], "big"), "a message is corrupt"
    return int.from_bytes(message[4:12], "big")


class Litter:
    """Memory that takes the place of what was freed, and must not change any more."""

    def __init__(self) -> None:
        self._pieces: deque[bytearray] = deque(maxlen=200)

    def drop(self, nbytes: int) -> None:
        self._pieces.append(bytearray([LITTER]) * nbytes)

    def check(self) -> None:
        for piece in self._pieces:
            assert piece.count(LITTER) == len(piece), "freed memory was written to"


class Load:
    """The two ends of a connection at work."""

    def __init__(self, pair: Pair, chance: random.Random, figures: Counter[str]) -> None:
        self.pair = pair
        self.near, self.far = pair.client, pair.server
        self.chance = chance
        self.figures = figures
        self.litter = Litter()
        self.added = self.perhaps_added = 0
        self.expected = 0
        self.is_iwarp = self.near._endpoint.device.is_iwarp

    async def prepare(self) -> None:
        self.constant = bytes(self.chance.randbytes(AREA))
        self.readable = await self.far.register(self.constant, AccessFlags.REMOTE_READ)
        self.writable = await self.far.allocate(AREA, SHARED)
        self.mailbox = await self.near.allocate(AREA, SHARED)
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_ATOMIC
        if not self.is_iwarp:
            self.counter = await self.far.allocate(8, access)
        self.cache = RegistrationCache(self.near, max_bytes=20_000)
        self.cached = [bytearray(5000) for _ in range(6)]

    def regions(self) -> list[MemoryRegion]:
        counter = [] if self.is_iwarp else [self.counter]
        return [self.readable, self.writable, self.mailbox, *counter]

    def size(self) -> int:
        return self.chance.randrange(1, OPTIONS.max_message_size - 20)

    # --- what is cancelled ---

    async def may_send(self, sender: Connection, receiver: Connection) -> None:
        while True:
            stats = receiver.stats
            taken = stats.messages_received - stats.messages_unread
            if sender.stats.messages_sent - taken < WINDOW:
                break
            await asyncio.sleep(0.001)

    async def send_copy(self) -> None:
        await self.may_send(self.near, self.far)
        await self.near.send(seal(0, self.chance.randbytes(self.size())))

    async def send_small(self) -> None:
        await self.may_send(self.near, self.far)
        await self.near.send(seal(0, b"small"))

    async def send_lent(self) -> None:
        await self.may_send(self.near, self.far)
        buffer = bytearray(seal(0, self.chance.randbytes(self.size())))
        region = await self.near.register(buffer, AccessFlags(0))
        try:
            await self.near.send(region)
        finally:
            self.free(region, len(buffer))
            del buffer

    async def send_pieces(self) -> None:
        await self.may_send(self.near, self.far)
        whole = seal(0, self.chance.randbytes(self.size()))
        middle = bytearray(whole[12:-3])
        region = await self.near.register(middle, AccessFlags(0)) if middle else None
        if region is None:
            return
        try:
            await self.near.send([whole[:12], region, whole[-3:]])
        finally:
            self.free(region, len(middle))
            del middle

    async def read(self) -> None:
        start = self.chance.randrange(AREA - 1)
        part = self.readable.remote[start : start + self.size()]
        buffer = bytearray(len(part))
        region = await self.near.register(buffer, SHARED)
        try:
            await self.near.read(part, region)
            assert buffer == self.constant[start : start + len(part)], "read something else"
        finally:
            self.free(region, len(buffer))
            del buffer

    async def write_lent(self) -> None:
        buffer = bytearray([7]) * self.size()
        region = await self.near.register(buffer, AccessFlags(0))
        try:
            await self.near.write(region, self.writable.remote)
        finally:
            self.free(region, len(buffer))
            del buffer

    async def write_copy(self) -> None:
        await self.near.write(b"\x07" * self.size(), self.writable.remote)

    async def add(self) -> None:
        self.perhaps_added += 1
        await self.near.fetch_and_add(self.counter.remote, 1)
        self.added += 1

    async def swap(self) -> None:
        await self.near.compare_and_swap(self.counter.remote, 1 << 60, 0)

    async def bind(self) -> None:
        region = await self.near.allocate(100, AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND)
        try:
            (await self.near.bind(region)).close()
        finally:
            region.close()

    async def from_the_cache(self) -> None:
        buffer = self.chance.choice(self.cached)
        region = await self.cache.register(buffer)
        try:
            await self.near.write(region, self.writable.remote)
        finally:
            region.close()

    async def unpin(self) -> None:
        buffer = bytearray(self.size())
        region = await self.near.register(buffer)
        await region.aclose()
        buffer.append(0)

    def free(self, region: MemoryRegion, nbytes: int) -> None:
        region.close()
        self.litter.drop(nbytes)

    async def take(self) -> None:
        """Receive in one of the ways there are; a message that was taken is the next in order."""
        kind = self.chance.randrange(3)
        if kind == 0:
            message = await self.near.recv()
        elif kind == 1:
            buffer = bytearray(8192)
            message = bytes(buffer[: await self.near.recv_into(buffer)])
        else:
            with await self.near.recv_message() as held:
                message = bytes(held.data)
        assert unseal(message) == self.expected, "a message is lost, or comes twice"
        self.expected += 1

    # --- what goes on meanwhile ---

    async def consume(self) -> None:
        async for message in self.far:
            unseal(message)
            self.figures["received"] += 1

    async def flood(self) -> None:
        number = 0
        while True:
            await self.may_send(self.far, self.near)
            await self.far.send(seal(number, b"x" * self.size()))
            number += 1

    async def keep_writing(self) -> None:
        while True:
            await self.far.write(b"\x09" * AREA, self.mailbox.remote)
            view = memoryview(self.mailbox)
            assert view[0] == view[AREA - 1] == 9
            self.figures["written by the peer"] += 1
            await asyncio.sleep(0)

    async def run(self, kinds: list[Callable[[], Awaitable[None]]]) -> None:
        """One task: one operation after another, each perhaps cancelled."""
        while True:
            kind = self.chance.choice(kinds)
            task = asyncio.ensure_future(kind())
            if self.chance.random() < 0.5:
                await asyncio.sleep(self.chance.choice([0, 0, 0.001, 0.01, 0.05]))
                task.cancel()
            done, _ = await asyncio.wait([task], timeout=PATIENCE)
            assert done, f"{kind.__name__} does not end"
            if task.cancelled():
                self.figures["cancelled"] += 1
            else:
                task.result()
                self.figures["ended"] += 1


async def one_connection(
    address: DeviceAddress, chance: random.Random, figures: Counter[str]
) -> None:
    async with connected(address, OPTIONS, OPTIONS) as pair:
        load = Load(pair, chance, figures)
        await load.prepare()
        kinds = [load.send_copy, load.send_small, load.send_lent, load.send_pieces, load.read]
        kinds += [load.write_lent, load.write_copy, load.from_the_cache, load.unpin]
        if not load.is_iwarp:
            kinds += [load.add, load.swap, load.bind]
        # The peer's first message waits for one of this side's: iWARP wants it so.
        await pair.client.send(seal(0, b"first"))
        consuming = asyncio.create_task(load.consume())
        tasks = [asyncio.create_task(load.run(kinds)) for _ in range(5)]
        tasks.append(asyncio.create_task(load.run([load.take])))
        tasks += [asyncio.create_task(load.flood()), asyncio.create_task(load.keep_writing())]
        done, _ = await asyncio.wait(
            tasks, timeout=chance.uniform(2, 8), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        load.litter.check()
        if chance.random() < 0.5:
            chance.choice([pair.client, pair.server]).abort()
            figures["aborted"] += 1
        for task in tasks:
            task.cancel()
        await finish([*tasks])
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), (ConnectionClosed, WorkRequestError))
        async with asyncio.timeout(PATIENCE):
            await pair.client.aclose()
            await asyncio.wait([consuming])
            await pair.server.aclose()
        if not load.is_iwarp:
            total = int.from_bytes(memoryview(load.counter), "little")
            assert load.added <= total <= load.perhaps_added
        load.litter.check()
        load.cache.close()
        for region in load.regions():
            await region.aclose()
        load.litter.check()
        figures["connections"] += 1


async def test_operations_cancelled_anywhere(
    address: DeviceAddress, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(4)
    figures: Counter[str] = Counter()
    with capsys.disabled():
        for _ in until_time_is_up(f"operations on {address.device}", figures):
            await one_connection(address, chance, figures)
    assert figures["cancelled"]
    assert figures["ended"]
    assert figures["received"]
