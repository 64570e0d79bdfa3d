"""A server that holds connections for as long as its first client stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma import Connection, Listener
from aiordma.loop import running_loop, task_group


async def hold(connection: Connection) -> None:
    """Wait for the peer to end it."""
    async for _ in connection:
        pass


async def hold_while(listener: Listener, first: Callable[[Connection], Awaitable[None]]) -> None:
    """Accept one connection and run `first(connection)`; hold all others until that has returned.

    So nobody has to count them: one that ends while it is being accepted is never seen.
    """
    async with await listener.accept() as connection, task_group(running_loop()) as tasks:
        tasks.create_task(listener.serve(hold))
        await first(connection)
        listener.abort()
