"""Two event loops of one process that use the same device, one of which ends first."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiordma
from aiordma import Connection, Listener
from aiordma.rdmacm import DeviceAddress

CONNECTIONS = 40
"""More than fit below the memory offset that libsiw cannot use: see verbs/offset_guard.py."""


async def connect(listener: Listener) -> tuple[Connection, Connection]:
    accepting = asyncio.create_task(listener.accept())
    return await aiordma.connect(*listener.local_address), await accepting


@pytest.mark.real("the memory offsets of the driver are the subject")
def test_a_loop_connects_after_another_one_has_ended(address: DeviceAddress) -> None:
    is_connected, may_end = threading.Event(), threading.Event()

    async def connect_first() -> None:
        async with aiordma.listen(address.host, 0) as listener:
            near, far = await connect(listener)
            is_connected.set()
            await asyncio.to_thread(may_end.wait)
            await asyncio.gather(near.aclose(), far.aclose())

    async def connect_many() -> None:
        async with aiordma.listen(address.host, 0) as listener:
            connections = [*await connect(listener)]
            may_end.set()
            await asyncio.to_thread(first.join)
            for _ in range(CONNECTIONS):
                connections += await connect(listener)
            await connections[-1].send(b"hello")
            assert await connections[-2].recv() == b"hello"
            for connection in connections:
                connection.abort()
            await asyncio.gather(*[connection.aclose() for connection in connections])

    first = threading.Thread(target=lambda: asyncio.run(connect_first()))
    first.start()
    try:
        is_connected.wait()
        asyncio.run(connect_many())
    finally:
        may_end.set()
        first.join()
