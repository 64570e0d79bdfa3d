"""Connections set up and torn down, so many at once."""

from __future__ import annotations

from collections.abc import Callable

import aiordma
from aiordma import ConnectionOptions
from aiordma.bench.sample import Sample
from aiordma.bench.sides.crowd import repeat
from aiordma.bench.sides.holding import hold, hold_while
from aiordma.bench.sides.timing import time_all
from aiordma.bench.work import Work

OPTIONS = ConnectionOptions(send_depth=1, recv_depth=1, max_message_size=64)


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Accept all of them, and wait for each to end."""
    async with aiordma.listen(host, 0, options=OPTIONS) as listener:
        announce(listener.local_address[1])
        await hold_while(listener, hold)


async def drive(host: str, port: int, work: Work) -> Sample:
    """Connect and close. One more connection keeps the server there."""

    async def connect() -> None:
        async with aiordma.connect(host, port, options=OPTIONS):
            pass

    async with aiordma.connect(host, port, options=OPTIONS):
        await repeat(work.warmup, work.concurrency, connect)
        return await time_all(lambda: repeat(work.count, work.concurrency, connect), work.count, 1)
