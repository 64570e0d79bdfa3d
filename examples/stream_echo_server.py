"""Send all bytes back to the client over RDMA, with readers and writers of asyncio.

    python examples/stream_echo_server.py [HOST] [PORT]

Only one import differs from a TCP program. The clients use the protocol of rsocket(7): they are
stream_echo_client.py, or TCP clients under librspreload. Without HOST it listens on all RDMA
addresses of this machine. Ctrl-C closes the open streams and ends it.
"""

import argparse
import asyncio
import contextlib
import signal

from aiordma.asyncio import start_server


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # a client can be killed at any time
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
    # close() makes serve_forever() raise CancelledError.
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", nargs="?", help="an RDMA address of this machine (default: all)")
    parser.add_argument("port", nargs="?", type=int, default=7472, help="0: any free port")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
