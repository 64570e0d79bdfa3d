"""Ask the service for the digest of each word."""

import asyncio
import sys

import aiordma


async def main(host: str, words: list[str]) -> None:
    async with aiordma.connect(host, 7471) as connection:
        for word in words:
            await connection.send(word.encode())
            print(word, (await connection.recv()).hex()[:16], flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2:]))
