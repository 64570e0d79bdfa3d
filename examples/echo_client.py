"""Send messages to an echo server, check the echoes, and measure the round-trip time.

    python examples/echo_client.py HOST [PORT] [MESSAGE ...]

The exit code is 1 if an echo was wrong.
"""

import argparse
import asyncio
import statistics
import sys
import time

import aiordma

ROUND_TRIPS = 200
PAYLOAD = bytes(range(64))


async def echo(connection: aiordma.Connection, message: bytes) -> None:
    await connection.send(message)
    answer = await connection.recv()
    if answer != message:
        sys.exit(f"sent {message!r}, got {answer!r}")


async def round_trip(connection: aiordma.Connection) -> float:
    begin = time.perf_counter()
    await echo(connection, PAYLOAD)
    return time.perf_counter() - begin


async def send_all(host: str, port: int, messages: list[str]) -> None:
    async with aiordma.connect(host, port) as connection:
        for message in messages:
            await echo(connection, message.encode())
            print(f"echoed: {message}")
        times = [await round_trip(connection) for _ in range(ROUND_TRIPS)]
    median = statistics.median(times) * 1e6
    print(f"round trip of {len(PAYLOAD)} bytes: {median:.0f} us (median of {ROUND_TRIPS})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("port", nargs="?", type=int, default=7471)
    parser.add_argument("messages", nargs="*", default=["hello", "over", "RDMA"])
    arguments = parser.parse_args()
    try:
        asyncio.run(send_all(arguments.host, arguments.port, arguments.messages))
    except aiordma.RdmaError as error:
        sys.exit(f"echo_client: {error}")


if __name__ == "__main__":
    main()
