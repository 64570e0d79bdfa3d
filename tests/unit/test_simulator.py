"""The simulated devices: connections, messages and streams between them."""

from __future__ import annotations

import loops
from simulator import Simulation

import aiordma
from aiordma import AccessFlags, Connection, PeerClosed

PORT = 7471


async def echo(listener: aiordma.Listener) -> None:
    async with await listener.accept() as connection:
        async for message in connection:
            await connection.send(message)


async def test_messages_come_back_in_order(simulation: Simulation) -> None:
    async with aiordma.listen(simulation.far.host, PORT) as listener:
        server = loops.create_task(echo(listener))
        async with aiordma.connect(simulation.far.host, PORT) as connection:
            for number in range(300):
                await connection.send(number.to_bytes(4, "big"))
                assert await connection.recv() == number.to_bytes(4, "big")
        await server


async def test_a_write_changes_the_memory_of_the_peer(simulation: Simulation) -> None:
    async def serve() -> bytes:
        async with await listener.accept() as connection:
            access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
            region = await connection.allocate(1 << 16, access)
            await connection.send(region.remote.pack())
            await connection.recv()
            return bytes(memoryview(region))

    async with aiordma.listen(simulation.far.host, PORT) as listener:
        server = loops.create_task(serve())
        async with aiordma.connect(simulation.far.host, PORT) as connection:
            remote = aiordma.RemoteBuffer.unpack(await connection.recv())
            await connection.write(b"x" * (1 << 16), remote)
            await connection.send(b"done")
            assert await server == b"x" * (1 << 16)


async def test_a_peer_that_aborts_is_noticed(simulation: Simulation) -> None:
    connections: list[Connection] = []

    async def accept() -> None:
        connections.append(await listener.accept())

    async with aiordma.listen(simulation.far.host, PORT) as listener:
        server = loops.create_task(accept())
        async with aiordma.connect(simulation.far.host, PORT) as connection:
            await server
            connections[0].abort()
            try:
                await connection.recv()
            except PeerClosed:
                return
            raise AssertionError("recv() has returned")
