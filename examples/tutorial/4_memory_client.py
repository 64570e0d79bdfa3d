"""Read and write memory of the server."""

import asyncio
import sys

import aiordma


async def main(host: str) -> None:
    async with aiordma.connect(host, 7471) as connection:
        await connection.send(b"ready")
        remote = aiordma.RemoteBuffer.unpack(await connection.recv())
        print("the server has", len(remote), "bytes")
        memory = bytearray(len(remote))
        async with await connection.register(memory, connection.read_access) as region:
            await connection.read(remote, region)
            print("read", bytes(memory[:5]))
            memory[:7] = b"goodbye"
            await connection.write(region[:7], remote)
        await connection.send(b"finished")


asyncio.run(main(sys.argv[1]))
