"""Connect with a name as private data."""

import asyncio
import sys

import aiordma


async def main(host: str, name: str) -> None:
    try:
        async with aiordma.connect(host, 7471, private_data=name.encode()) as connection:
            print("accepted:", connection.private_data.rstrip(b"\0").decode())
            await connection.send(b"good morning")
            print((await connection.recv()).decode())
    except aiordma.Rejected as error:
        print("rejected:", error.private_data.rstrip(b"\0").decode())


asyncio.run(main(sys.argv[1], sys.argv[2]))
