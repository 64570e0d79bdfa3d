"""An echo service on asyncio's own readers and writers, over RDMA.

    python examples/stream_echo_server.py [HOST] [PORT]

But for one import it is a TCP program. Its clients speak rsocket(7): stream_echo_client.py, or one
for TCP that runs under librspreload. Without a host it listens on all RDMA addresses of this
machine. Ctrl-C ends it, and tells the clients that are connected.
"""

import argparse
import asyncio
import contextlib
import signal

from aiordma.asyncio import start_server


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # a client that was killed is no reason to complain
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(host: str | None, port: int) -> None:
    server = await start_server(echo, host, port)

    def stop() -> None:
        server.close()
        server.close_clients()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
    with contextlib.suppress(asyncio.CancelledError):  # so it ends when it is closed
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", nargs="?", help="address of an RDMA device here (default: all)")
    parser.add_argument("port", nargs="?", type=int, default=7472, help="0 picks one")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
