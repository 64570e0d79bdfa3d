"""Send one message to the echo server, and print the answer."""

import asyncio
import sys

import aiordma


async def main(host: str) -> None:
    async with aiordma.connect(host, 7471) as connection:
        await connection.send(b"hello")
        print(await connection.recv())


asyncio.run(main(sys.argv[1]))
