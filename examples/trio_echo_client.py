"""Send messages to an echo server on trio: one connection for each, with a timeout.

    python examples/trio_echo_client.py HOST [PORT] [MESSAGE ...]

The exit code is 1 if an echo was wrong or late.
"""

import argparse
import sys

import trio

import aiordma

TIMEOUT = 10.0


async def send_one(host: str, port: int, message: bytes) -> None:
    """Send a message and check its echo.

    The timeout cancels any of these awaits, and no connection is left behind.
    """
    with trio.fail_after(TIMEOUT):
        async with aiordma.connect(host, port) as connection:
            await connection.send(message)
            answer = await connection.recv()
    if answer != message:
        sys.exit(f"sent {message!r}, got {answer!r}")
    print(f"echoed: {message.decode()}")


async def send_all(host: str, port: int, messages: list[str]) -> None:
    async with trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(send_one, host, port, message.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("port", nargs="?", type=int, default=7471)
    parser.add_argument("messages", nargs="*", default=["hello", "over", "RDMA"])
    arguments = parser.parse_args()
    failures: list[Exception] = []
    try:
        trio.run(send_all, arguments.host, arguments.port, arguments.messages)
    except* (aiordma.RdmaError, trio.TooSlowError) as group:
        failures += group.exceptions
    if failures:
        sys.exit(f"trio_echo_client: {failures[0]!r}")


if __name__ == "__main__":
    main()
