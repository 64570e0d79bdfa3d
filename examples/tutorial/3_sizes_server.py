"""Send back messages of up to 1 MiB."""

import asyncio
import contextlib

import aiordma

OPTIONS = aiordma.ConnectionOptions(max_message_size=1 << 20, recv_depth=4)


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def main() -> None:
    async with aiordma.listen(None, 7471, options=OPTIONS) as listener:
        print("listening", flush=True)
        await listener.serve(echo)


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
