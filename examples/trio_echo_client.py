"""echo_client.py on trio: several connections at once, each with a deadline.

    python examples/trio_echo_client.py HOST [PORT] [MESSAGE ...]

Exits with 1 if an echo was wrong, or late.
"""

import argparse
import sys

import trio

import aiordma

PATIENCE = 10.0


async def talk(host: str, port: int, message: bytes) -> None:
    """Every await takes part in trio's deadlines, and leaves nothing behind when one passes."""
    with trio.fail_after(PATIENCE):
        async with aiordma.connect(host, port) as connection:
            await connection.send(message)
            answer = await connection.recv()
    if answer != message:
        sys.exit(f"sent {message!r}, got {answer!r}")
    print(f"echoed: {message.decode()}")


async def talk_all(host: str, port: int, messages: list[str]) -> None:
    async with trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(talk, host, port, message.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("port", nargs="?", type=int, default=7471)
    parser.add_argument("messages", nargs="*", default=["hello", "over", "RDMA"])
    arguments = parser.parse_args()
    failures: list[Exception] = []
    try:
        trio.run(talk_all, arguments.host, arguments.port, arguments.messages)
    except* (aiordma.RdmaError, trio.TooSlowError) as group:
        failures += group.exceptions
    if failures:
        sys.exit(f"trio_echo_client: {failures[0]!r}")


if __name__ == "__main__":
    main()
