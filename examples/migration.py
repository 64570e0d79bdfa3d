"""Migration: ids move between the event loop and threads, and on to a Connection.

    python examples/migration.py [ADDRESS]

A listener starts on the loop, takes a request synchronously, and serves the next on the loop again.
Its clients are endpoints of rdma_create_ep(), carried on as Connections.
"""

import asyncio
import sys

from aiordma import AddrInfo, AsyncCmId, Connection, Listener, SyncCmId
from aiordma.rdmacm import device_addresses, parse_address


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def ask(host: str, port: int, message: bytes) -> None:
    info = AddrInfo(destination=parse_address(host, port))
    endpoint = await SyncCmId.create_ep(info)
    async with Connection.from_id(endpoint) as connection:  # moves it to the loop
        await connection.send(message)
        print("echoed:", (await connection.recv()).decode())


async def main(host: str) -> None:
    on_loop = await AsyncCmId.create()
    on_loop.bind_addr(parse_address(host))
    on_loop.listen()
    where = on_loop.local_address

    in_threads = await on_loop.migrate(None)
    asking = asyncio.create_task(ask(*where, b"a request that a thread has waited for"))
    request = await in_threads.get_request()
    print("request from", request.peer_address[0])
    async with Connection.from_id(request) as connection:
        await echo(connection)
    await asking

    async with Listener.from_id(in_threads) as listener:
        serving = asyncio.create_task(listener.serve(echo))
        await ask(*where, b"a request that came through the loop")
        await listener.aclose()
        await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else device_addresses()[0].host))
