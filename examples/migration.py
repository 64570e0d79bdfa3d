"""Move ids between the event loop and threads, and make Connections of them.

    python examples/migration.py [ADDRESS]

A listener starts on the event loop, waits for one request in a thread, and serves the next one on
the event loop again. Its clients are endpoints of rdma_create_ep(3) that become Connections.
"""

import asyncio
import sys

from aiordma import AddrInfo, AsyncCmId, Connection, Listener, SyncCmId
from aiordma.rdmacm import device_addresses, parse_address


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def send_one(host: str, port: int, message: bytes) -> None:
    info = AddrInfo(destination=parse_address(host, port))
    endpoint = await SyncCmId.create_ep(info)
    async with Connection.from_id(endpoint) as connection:  # moves the id to the loop
        await connection.send(message)
        print("echoed:", (await connection.recv()).decode())


async def main(host: str) -> None:
    on_loop = await AsyncCmId.create()
    on_loop.bind_addr(parse_address(host))
    on_loop.listen()
    server = on_loop.local_address

    in_threads = await on_loop.migrate(None)
    sending = asyncio.create_task(send_one(*server, b"a request that a thread waited for"))
    request = await in_threads.get_request()
    print("request from", request.peer_address[0])
    async with Connection.from_id(request) as connection:
        await echo(connection)
    await sending

    async with Listener.from_id(in_threads) as listener:
        serving = asyncio.create_task(listener.serve(echo))
        await send_one(*server, b"a request that the event loop waited for")
        await listener.aclose()
        await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else device_addresses()[0].host))
