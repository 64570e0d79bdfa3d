"""Send messages of several sizes."""

import asyncio
import sys

import aiordma

OPTIONS = aiordma.ConnectionOptions(max_message_size=1 << 20, recv_depth=4)


async def main(host: str) -> None:
    async with aiordma.connect(host, 7471, options=OPTIONS) as connection:
        for size in (0, 64, 65536, connection.max_message_size):
            await connection.send(bytes(size))
            print(len(await connection.recv()), "bytes came back")
        try:
            await connection.send(bytes(connection.max_message_size + 1))
        except ValueError:
            print("one byte more is too large")
        print(connection.stats.messages_sent, "messages sent")


asyncio.run(main(sys.argv[1]))
