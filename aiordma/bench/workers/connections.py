"""Connections: the time to set them up and tear them down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import aiordma
from aiordma import Connection, ConnectionOptions
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all
from aiordma.loop import running_loop, task_group
from aiordma.loop.context_managers import Closable

P_co = TypeVar("P_co", bound=Closable, covariant=True)
P = TypeVar("P", bound=Closable)


class AnyListener(Protocol[P_co]):
    """A listener for connections or for byte streams."""

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)`."""

    async def accept(self) -> P_co:
        """Return the next peer."""

    async def serve(self, handler: Callable[[P_co], Awaitable[object]]) -> None:
        """Run the handler for each peer."""

    def abort(self) -> None:
        """Stop listening."""


async def keep_open(connection: Connection) -> None:
    """Keep a connection open until the peer closes it."""
    async for _ in connection:
        pass


async def serve_while(
    listener: AnyListener[P],
    first: Callable[[P], Awaitable[None]],
    others: Callable[[P], Awaitable[None]],
) -> None:
    """Accept a connection and run `first(connection)`; serve all others until it returns.

    The server stops when the first connection ends, not after a number of connections. Their number
    is unknown: a connection that the client closes while it is being accepted is never accepted.
    """
    connection = await listener.accept()
    try:
        async with task_group(running_loop()) as tasks:
            tasks.create_task(listener.serve(others))
            await first(connection)
            listener.abort()
    finally:
        await connection.aclose()


async def repeat(count: int, concurrency: int, function: Callable[[], Awaitable[None]]) -> None:
    """Await `function()` `count` times, in at most `concurrency` tasks."""
    remaining = [None] * count

    async def work() -> None:
        while remaining:
            remaining.pop()
            await function()

    async with task_group(running_loop()) as tasks:
        for _ in range(min(concurrency, count)):
            tasks.create_task(work())


# --- set up and torn down ---

SMALL = ConnectionOptions(send_depth=1, recv_depth=1, max_message_size=64)


async def serve_connections(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Accept connections, and keep each open until the client closes it."""
    async with aiordma.listen(host, 0, options=SMALL) as listener:
        announce(listener.local_address[1])
        await serve_while(listener, keep_open, keep_open)


async def measure_connections(host: str, port: int, work: Work) -> Sample:
    """Connect and close, again and again. One more connection keeps the server running."""

    async def connect() -> None:
        async with aiordma.connect(host, port, options=SMALL):
            pass

    async with aiordma.connect(host, port, options=SMALL):
        await repeat(work.warmup, work.concurrency, connect)
        return await time_all(lambda: repeat(work.count, work.concurrency, connect), work.count, 1)
