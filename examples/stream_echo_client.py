"""Send messages to an echo server over RDMA, with a reader and a writer of asyncio.

    python examples/stream_echo_client.py HOST [PORT] [MESSAGE ...]

Only one import differs from a TCP program. The server uses the protocol of rsocket(7): it is
stream_echo_server.py, or a TCP server under librspreload. The exit code is 1 if an echo was wrong.
"""

import argparse
import asyncio
import sys

from aiordma.asyncio import open_connection


async def send_all(host: str, port: int, messages: list[str]) -> None:
    reader, writer = await open_connection(host, port)
    try:
        for message in messages:
            data = message.encode()
            writer.write(data)
            await writer.drain()
            answer = await reader.readexactly(len(data))
            if answer != data:
                sys.exit(f"sent {data!r}, got {answer!r}")
            print(f"echoed: {message}")
        writer.write_eof()
        if rest := await reader.read():
            sys.exit(f"got {rest!r} after the echoes")
    finally:
        writer.close()
    await writer.wait_closed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("port", nargs="?", type=int, default=7472)
    parser.add_argument("messages", nargs="*", default=["hello", "over", "RDMA"])
    arguments = parser.parse_args()
    try:
        asyncio.run(send_all(arguments.host, arguments.port, arguments.messages))
    except (OSError, EOFError) as error:
        sys.exit(f"stream_echo_client: {error}")


if __name__ == "__main__":
    main()
