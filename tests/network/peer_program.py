"""The program of the peer on another node: servers that a test starts by commands on its input.

Each line of input is a command in JSON, with the name of a function below and its arguments. Each
line of output is the answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiordma
from aiordma import AccessFlags, ByteStream, Connection, ConnectionOptions, StreamOptions

ECHO, MEMORY = b"E", b"M"
MEMORY_SIZE = 1 << 20
_tasks: set[asyncio.Task[None]] = set()


async def serve_messages(host: str, **options: Any) -> int:
    """Serve connections. Return the port."""
    listener = await aiordma.listen(host, 0, options=ConnectionOptions(**options))
    _keep(listener.serve(answer_messages))
    return listener.local_address[1]


async def serve_streams(host: str, **options: Any) -> int:
    """Serve byte streams, which are sent back. Return the port."""
    listener = await aiordma.listen_stream(host, 0, options=StreamOptions(**options))
    _keep(listener.serve(answer_stream))
    return listener.local_address[1]


async def serve_datagrams(host: str) -> int:
    """Serve datagrams, which are sent back. Return the port."""
    endpoint = await aiordma.open_datagram((host, 0))
    endpoint.listen()
    _keep(endpoint.serve(b""))
    _keep(answer_datagrams(endpoint))
    return endpoint.local_address[1]


async def listen_only(host: str) -> int:
    """Listen, and answer no request. Return the port."""
    listener = await aiordma.listen(host, 0)
    _keep(_wait_for_ever(listener))
    return listener.local_address[1]


async def answer_messages(connection: Connection) -> None:
    """Send messages back. Give the peer memory if it asks for it."""
    region = None
    async for message in connection:
        if message == MEMORY:
            access = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.LOCAL_WRITE
            region = await connection.allocate(MEMORY_SIZE, access)
            await connection.send(region.remote.pack())
        else:
            await connection.send(message)
    if region is not None:
        await region.aclose()


async def answer_stream(stream: ByteStream) -> None:
    """Send bytes back, until the peer ends its half."""
    while data := await stream.receive():
        await stream.send(data)


async def answer_datagrams(endpoint: aiordma.DatagramEndpoint) -> None:
    """Send datagrams back."""
    while True:
        datagram = await endpoint.recv_from()
        await endpoint.send_to(datagram.peer, datagram.data)


async def _wait_for_ever(listener: aiordma.Listener) -> None:
    async with listener:
        await asyncio.get_running_loop().create_future()


def _keep(work: Awaitable[None]) -> None:
    async def run() -> None:
        await work

    task = asyncio.create_task(run())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


COMMANDS: dict[str, Callable[..., Awaitable[object]]] = {
    function.__name__: function
    for function in (serve_messages, serve_streams, serve_datagrams, listen_only)
}


async def main() -> None:
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments, options = json.loads(line)
        print(json.dumps(await COMMANDS[name](*arguments, **options)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
