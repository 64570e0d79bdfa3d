"""Send every message back to its peer.

    python examples/echo_server.py [HOST] [PORT]

Without HOST it listens on all RDMA addresses of this machine. Ctrl-C ends it.
"""

import argparse
import asyncio
import contextlib

import aiordma


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def serve(host: str | None, port: int) -> None:
    async with aiordma.listen(host, port) as listener:
        print(f"listening on port {listener.local_address[1]}", flush=True)
        await listener.serve(echo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", nargs="?", help="an RDMA address of this machine (default: all)")
    parser.add_argument("port", nargs="?", type=int, default=7471, help="0: any free port")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
