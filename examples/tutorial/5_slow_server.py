"""Answer one message of each peer after two seconds, and close the connection."""

import asyncio
import contextlib

import aiordma


async def answer_once(connection: aiordma.Connection) -> None:
    question = await connection.recv()
    await asyncio.sleep(2)
    await connection.send(b"answer to " + question)


async def main() -> None:
    async with aiordma.listen(None, 7471) as listener:
        print("listening", flush=True)
        await listener.serve(answer_once)


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
