"""Send messages to an echo server through aiordma.anyio, on asyncio or on trio.

    python examples/anyio_echo_client.py [--backend asyncio|trio] HOST [PORT] [MESSAGE ...]

The messages are text: the TextStream of anyio encodes and decodes them. The exit code is 1 if an
echo was wrong.
"""

import argparse
import sys

import anyio
from anyio.streams.text import TextStream

import aiordma
import aiordma.anyio


async def send_all(host: str, port: int, messages: list[str]) -> None:
    async with aiordma.anyio.connect(host, port) as stream:
        text = TextStream(stream)
        for message in messages:
            await text.send(message)
            answer = await text.receive()
            if answer != message:
                sys.exit(f"sent {message!r}, got {answer!r}")
            print(f"echoed: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("host")
    parser.add_argument("port", nargs="?", type=int, default=7471)
    parser.add_argument("messages", nargs="*", default=["hello", "over", "RDMA"])
    arguments = parser.parse_args()
    try:
        anyio.run(
            send_all,
            arguments.host,
            arguments.port,
            arguments.messages,
            backend=arguments.backend,
        )
    except aiordma.RdmaError as error:
        sys.exit(f"anyio_echo_client: {error}")


if __name__ == "__main__":
    main()
