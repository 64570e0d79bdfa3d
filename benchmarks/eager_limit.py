"""Compares sending a message with its bytes to announcing it, for several sizes.

    python -m aiordma lab run -- python -m benchmarks.eager_limit [--seconds S] [HOST]

It prints the microseconds of a message one way, both sides in one process: the median of ROUNDS
rounds, in which all ways take turns. The size from which announcing takes less time is the best
`eager_limit`. docs/message_streams.md has the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from contextlib import AsyncExitStack

import aiordma
from aiordma import AccessFlags, MemorySlice, MessageOptions, MessageStream
from aiordma.rdmacm import device_addresses

SIZES = [1 << 8, 1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 18]
LARGEST_SLOT = 1 << 20
ROUNDS = 5
EAGER = MessageOptions(slot_size=LARGEST_SLOT, eager_limit=LARGEST_SLOT)
ANNOUNCED = MessageOptions(eager_limit=0)
WAYS = {
    "with its bytes": (EAGER, False),
    "announced, registered memory": (ANNOUNCED, True),
    "announced, bytes": (ANNOUNCED, False),
}


class Pair:
    """Both ends of a stream, and a message for each size."""

    def __init__(self, near: MessageStream, far: MessageStream) -> None:
        self._near, self._far = near, far
        self._messages: dict[int, MemorySlice | bytes] = {}

    async def prepare(self, *, registers: bool) -> None:
        """Make the messages, of registered memory or of bytes."""
        for size in SIZES:
            memory = await self._near.allocate(size, AccessFlags.REMOTE_READ)
            self._messages[size] = memory[:] if registers else bytes(size)

    async def time_messages(self, size: int, seconds: float) -> float:
        """Return the microseconds of a message one way: it is sent, and received as bytes."""
        message, count = self._messages[size], 0
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            self._near.send_soon(message)
            await self._far.recv()
            await self._near.drain()
            count += 1
        return (time.perf_counter() - began) / count * 1e6


async def main(host: str, seconds: float) -> None:
    """Measure and print the table."""
    async with AsyncExitStack() as stack:
        pairs = {}
        for way, (options, registers) in WAYS.items():
            listener = await stack.enter_async_context(
                aiordma.listen_messages(host, 0, options=options)
            )
            accepting = asyncio.create_task(listener.accept())
            near = await aiordma.connect_messages(*listener.local_address, options=options)
            far = await accepting
            for stream in (near, far):
                await stack.enter_async_context(stream)
            pairs[way] = Pair(near, far)
            await pairs[way].prepare(registers=registers)
        print(f"{'bytes':>9}", *(f"{way:>30}" for way in WAYS))
        for size in SIZES:
            results = defaultdict(list)
            for _ in range(ROUNDS + 1):  # the first round warms up
                for way, pair in pairs.items():
                    results[way].append(await pair.time_messages(size, seconds))
            medians = [statistics.median(results[way][1:]) for way in WAYS]
            print(f"{size:>9,}", *(f"{median:>30,.0f}" for median in medians), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("host", nargs="?", help="the address of a device of this machine")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a way and size in a round")
    arguments = parser.parse_args()
    address = arguments.host or next(one.host for one in device_addresses())
    asyncio.run(main(address, arguments.seconds))
