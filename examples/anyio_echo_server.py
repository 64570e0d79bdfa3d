"""Send every message back to its peer through aiordma.anyio, on asyncio or on trio.

    python examples/anyio_echo_server.py [--backend asyncio|trio] [HOST] [PORT]

Without HOST it listens on all RDMA addresses of this machine. Ctrl-C ends it.
"""

import argparse
import contextlib

import anyio
from anyio.abc import SocketAttribute

import aiordma.anyio
from aiordma.anyio import RdmaConnection


async def echo(stream: RdmaConnection) -> None:
    # An exception in a handler would end the server, so a peer that fails must not raise one.
    with contextlib.suppress(anyio.BrokenResourceError):
        async for message in stream:
            await stream.send(message)


async def serve(host: str | None, port: int) -> None:
    async with aiordma.anyio.listen(host, port) as listener:
        print(f"listening on port {listener.extra(SocketAttribute.local_port)}", flush=True)
        await listener.serve(echo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("host", nargs="?", help="an RDMA address of this machine (default: all)")
    parser.add_argument("port", nargs="?", type=int, default=7471, help="0: any free port")
    arguments = parser.parse_args()
    try:
        anyio.run(serve, arguments.host, arguments.port, backend=arguments.backend)
    except* KeyboardInterrupt:  # trio raises it from a task group
        pass


if __name__ == "__main__":
    main()
