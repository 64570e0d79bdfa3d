"""Meet a timeout, and three errors."""

import asyncio
import sys

import aiordma


async def main(host: str) -> None:
    try:
        await aiordma.connect(host, 1)  # no program listens on this port
    except aiordma.Rejected as error:
        print("Rejected: status", error.status)

    async with aiordma.connect(host, 7471) as connection:
        await connection.send(b"question")
        try:
            async with asyncio.timeout(0.5):
                await connection.recv()
        except TimeoutError:
            print("TimeoutError: no answer yet")
        print("received:", await connection.recv())
        try:
            await connection.recv()
        except aiordma.PeerClosed as error:
            print("PeerClosed:", error)

    try:
        await connection.send(b"one more")
    except aiordma.LocalClosed as error:
        print("LocalClosed:", error)


asyncio.run(main(sys.argv[1]))
