"""Send every message back to its peer."""

import asyncio
import contextlib

import aiordma


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def main() -> None:
    async with aiordma.listen(None, 7471) as listener:
        print("listening", flush=True)
        await listener.serve(echo)


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
