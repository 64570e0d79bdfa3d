"""Cancel a task that receives, and receive its message in another task."""

import asyncio
import contextlib
import sys

import aiordma


async def main(host: str) -> None:
    async with aiordma.connect(host, 7471) as connection:
        await connection.send(b"question")
        task = asyncio.create_task(connection.recv())
        await asyncio.sleep(0.5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        print("cancelled:", task.cancelled())
        print("received:", await connection.recv())


asyncio.run(main(sys.argv[1]))
