"""All awaits of the data path, cancelled at random moments under load, while the peer writes.

The memory of a cancelled operation is freed and reused at once. Its new content must not change.
Operations that are not cancelled must give the right result, and no message is lost.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from campaign import Campaign, finish
from helpers import SHARED, TIME_LIMIT, Pair, connected

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
NO_ACCESS = AccessFlags(0)
PATTERN_BYTE = 0xAA
AREA = 8192
# iWARP has no flow control: this is the limit of messages sent and not yet read.
WINDOW = 24


def seal(number: int, payload: bytes) -> bytes:
    """Return a message with a checksum, a number and a payload."""
    body = number.to_bytes(8, "big") + payload
    return zlib.crc32(body).to_bytes(4, "big") + body


def unseal(message: bytes) -> int:
    """Check a message's checksum. Return its number."""
    assert zlib.crc32(message[4:]) == int.from_bytes(message[:4], "big"), "a message is corrupt"
    return int.from_bytes(message[4:12], "big")


class Workload:
    """The operations on both ends of a connection, and their memory."""

    def __init__(self, pair: Pair, campaign: Campaign) -> None:
        self.near, self.far = pair.client, pair.server
        self.chance, self.figures = campaign.chance, campaign.figures
        self.freed: deque[bytearray] = deque(maxlen=200)
        """Buffers that reuse freed memory. Their content must not change."""
        self.added = self.perhaps_added = 0
        self.expected = 0
        self.is_iwarp = self.near._endpoint.device.is_iwarp

    async def prepare(self) -> None:
        """Allocate and register the memory of all operations."""
        self.constant = self.chance.randbytes(AREA)
        self.readable = await self.far.register(self.constant, AccessFlags.REMOTE_READ)
        self.writable = await self.far.allocate(AREA, SHARED)
        self.mailbox = await self.near.allocate(AREA, SHARED)
        self.regions = [self.readable, self.writable, self.mailbox]
        if not self.is_iwarp:
            access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_ATOMIC
            self.counter = await self.far.allocate(8, access)
            self.regions.append(self.counter)
        self.cache = RegistrationCache(self.near, max_bytes=20_000)
        self.cached = [bytearray(5000) for _ in range(6)]

    def check_freed(self) -> None:
        for buffer in self.freed:
            assert buffer.count(PATTERN_BYTE) == len(buffer), "freed memory was written to"

    def size(self) -> int:
        """Return a random message size."""
        return self.chance.randrange(1, OPTIONS.max_message_size - 20)

    # --- operations that are cancelled ---

    async def wait_for_window(self, sender: Connection, receiver: Connection) -> None:
        """Wait until fewer than WINDOW messages are sent and not yet read."""
        while True:
            stats = receiver.stats
            taken = stats.messages_received - stats.messages_unread
            if sender.stats.messages_sent - taken < WINDOW:
                break
            await asyncio.sleep(0.001)

    @asynccontextmanager
    async def registered(
        self, data: bytes, access: AccessFlags = NO_ACCESS
    ) -> AsyncIterator[tuple[MemoryRegion, bytearray]]:
        """Register a copy of `data`. Close the region after the block, and reuse the memory."""
        buffer = bytearray(data)
        region = await self.near.register(buffer, access)
        try:
            yield region, buffer
        finally:
            region.close()
            self.freed.append(bytearray([PATTERN_BYTE]) * len(data))

    async def send(self) -> None:
        """Send a message as a copy, from registered memory, or in pieces of both."""
        await self.wait_for_window(self.near, self.far)
        whole = seal(0, self.chance.randbytes(self.chance.choice([4, self.size() + 3])))
        kind = self.chance.randrange(3)
        if kind == 0:
            await self.near.send(whole)
        elif kind == 1:
            async with self.registered(whole) as (region, _):
                await self.near.send(region)
        else:
            async with self.registered(whole[12:-3]) as (region, _):
                await self.near.send([whole[:12], region, whole[-3:]])

    async def read(self) -> None:
        start = self.chance.randrange(AREA - 1)
        part = self.readable.remote[start : start + self.size()]
        async with self.registered(bytes(len(part)), SHARED) as (region, buffer):
            await self.near.read(part, region)
            assert buffer == self.constant[start : start + len(part)], "other bytes were read"

    async def write(self) -> None:
        """Write a copy, registered memory, or memory of the registration cache."""
        kind, data = self.chance.randrange(3), b"\x07" * self.size()
        if kind == 0:
            await self.near.write(data, self.writable.remote)
        elif kind == 1:
            async with self.registered(data) as (region, _):
                await self.near.write(region, self.writable.remote)
        else:
            with await self.cache.register(self.chance.choice(self.cached), SHARED) as cached:
                await self.near.write(cached, self.writable.remote)

    async def use_counter(self) -> None:
        self.perhaps_added += 1
        await self.near.fetch_and_add(self.counter.remote, 1)
        self.added += 1
        await self.near.compare_and_swap(self.counter.remote, 1 << 60, 0)

    async def bind(self) -> None:
        region = await self.near.allocate(100, AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND)
        with region:
            (await self.near.bind(region)).close()

    async def deregister(self) -> None:
        buffer = bytearray(self.size())
        region = await self.near.register(buffer)
        await region.aclose()
        buffer.append(0)

    async def receive(self) -> None:
        """Receive by one of three methods. The message must be the next in order."""
        kind = self.chance.randrange(3)
        if kind == 0:
            message = await self.near.recv()
        elif kind == 1:
            buffer = bytearray(8192)
            message = bytes(buffer[: await self.near.recv_into(buffer)])
        else:
            with await self.near.recv_message() as received:
                message = bytes(received.data)
        assert unseal(message) == self.expected, "a message was lost or duplicated"
        self.expected += 1

    # --- tasks that run at the same time ---

    async def consume(self) -> None:
        async for message in self.far:
            unseal(message)
            self.figures["received"] += 1

    async def flood(self) -> None:
        number = 0
        while True:
            await self.wait_for_window(self.far, self.near)
            await self.far.send(seal(number, b"x" * self.size()))
            number += 1

    async def keep_writing(self) -> None:
        while True:
            await self.far.write(b"\x09" * AREA, self.mailbox.remote)
            view = memoryview(self.mailbox)
            assert view[0] == view[AREA - 1] == 9
            self.figures["written by the peer"] += 1
            await asyncio.sleep(0)

    async def run(self, kinds: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run random operations one after another, and cancel about half of them."""
        while True:
            kind = self.chance.choice(kinds)
            task = asyncio.ensure_future(kind())
            if self.chance.random() < 0.5:
                await asyncio.sleep(self.chance.choice([0, 0, 0.001, 0.01, 0.05]))
                task.cancel()
            await asyncio.wait([task])
            self.figures["cancelled" if task.cancelled() else "ended"] += 1
            if not task.cancelled():
                task.result()


async def one_connection(address: DeviceAddress, campaign: Campaign) -> None:
    """Connect, run all operations for some seconds, and close or abort."""
    async with connected(address, OPTIONS, OPTIONS) as pair:
        workload = Workload(pair, campaign)
        await workload.prepare()
        kinds = [workload.send, workload.read, workload.write, workload.deregister]
        if not workload.is_iwarp:
            kinds += [workload.use_counter, workload.bind]
        # On iWARP the accepting side can send only after it has received a message.
        await pair.client.send(seal(0, b"first"))
        consuming = asyncio.create_task(workload.consume())
        calls = [*(workload.run(kinds) for _ in range(5)), workload.run([workload.receive])]
        calls += [workload.flood(), workload.keep_writing()]
        tasks = [asyncio.create_task(call) for call in calls]
        done, _ = await asyncio.wait(
            tasks, timeout=campaign.chance.uniform(2, 8), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        workload.check_freed()
        if campaign.chance.random() < 0.5:
            campaign.chance.choice([pair.client, pair.server]).abort()
            campaign.figures["aborted"] += 1
        for task in tasks:
            task.cancel()
        await finish(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), (ConnectionClosed, WorkRequestError))
        async with asyncio.timeout(TIME_LIMIT):
            await pair.client.aclose()
            await asyncio.wait([consuming])
            await pair.server.aclose()
        if not workload.is_iwarp:
            total = int.from_bytes(memoryview(workload.counter), "little")
            assert workload.added <= total <= workload.perhaps_added
        workload.check_freed()
        workload.cache.close()
        for region in workload.regions:
            await region.aclose()
        workload.check_freed()


async def test_operations_cancelled_at_random_moments(
    address: DeviceAddress, campaign: Campaign
) -> None:
    for _ in campaign.rounds():
        await one_connection(address, campaign)
    assert all(campaign.figures[name] for name in ("cancelled", "ended", "received"))
