"""The program of the peer on another node: servers that a test starts by commands on its input.

Each line of input is a command in JSON, with the name of a function below and its arguments. The
answer is a line of output that begins with "answer ". Other lines are those of the log.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from netlink import rdma_resources

import aiordma
from aiordma import AccessFlags, ByteStream, Connection, ConnectionOptions, StreamOptions

MEMORY = b"M"
MEMORY_SIZE = 1 << 20
SETTLE_SECONDS = 100
_tasks: set[asyncio.Task[None]] = set()
_listeners: list[aiordma.Listener] = []
_may_read = asyncio.Event()


async def serve_messages(host: str, port: int = 0, **options: Any) -> int:
    """Serve connections. Return the port."""
    listener = await aiordma.listen(host, port, options=ConnectionOptions(**options))
    _keep(_serve(listener, answer_messages))
    return listener.local_address[1]


async def serve_streams(host: str, port: int = 0, **options: Any) -> int:
    """Serve byte streams, which are sent back. Return the port."""
    listener = await aiordma.listen_stream(host, port, options=StreamOptions(**options))
    _keep(_serve(listener, answer_stream))
    return listener.local_address[1]


async def serve_datagrams(host: str) -> int:
    """Serve datagrams, which are sent back. Return the port."""
    endpoint = await aiordma.open_datagram((host, 0))
    endpoint.listen()
    _keep(_serve_datagrams(endpoint))
    return endpoint.local_address[1]


async def listen_only(host: str) -> int:
    """Listen, and answer no request. Return the port."""
    listener = await aiordma.listen(host, 0)
    _listeners[:] = [listener]
    _keep(_wait_for_ever(listener))
    return listener.local_address[1]


async def requests_waiting() -> int:
    """Return the number of requests that the listener of `listen_only()` has."""
    return _listeners[0].stats.requests_waiting


async def serve_late(host: str) -> int:
    """Serve connections that send a burst at once, and read only after `read()`."""
    _may_read.clear()
    listener = await aiordma.listen(host, 0)
    _keep(_serve(listener, burst))
    return listener.local_address[1]


async def read() -> None:
    """Let the connections of `serve_late()` read."""
    _may_read.set()


async def stall(seconds: float) -> None:
    """Block the event loop, right after the answer to this command is written."""
    asyncio.get_running_loop().call_later(0.01, time.sleep, seconds)


async def stop() -> dict[str, int]:
    """End all servers and connections. Return the RDMA resources that are left."""
    _listeners.clear()
    for task in _tasks:
        task.cancel()
    if _tasks:
        await asyncio.wait(_tasks)
    gc.collect()
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := _resources()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


def _resources() -> dict[str, int]:
    """Return the ids, queue pairs and memory regions of this node, without those of its kernel."""
    counts = {
        f"{device} {kind}": count - (kind == "qp")  # the queue pair of the kernel's own messages
        for device, kinds in rdma_resources().items()
        for kind, count in kinds.items()
        if kind in ("qp", "cm_id", "mr") and not (kind == "qp" and device.startswith("siw"))
    }
    return {name: count for name, count in counts.items() if count > 0}


async def answer_messages(connection: Connection) -> None:
    """Send messages back. Give the peer memory if it asks for it."""
    region = None
    try:
        async for message in connection:
            if message == MEMORY:
                access = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
                region = await connection.allocate(MEMORY_SIZE, access | AccessFlags.LOCAL_WRITE)
                await connection.send(region.remote.pack())
            else:
                await connection.send(message)
    finally:
        if region is not None:
            region.close()


async def answer_stream(stream: ByteStream) -> None:
    """Send bytes back, until the peer ends its half."""
    while data := await stream.receive():
        await stream.send(data)


async def burst(connection: Connection) -> None:
    """Send as many messages as the peer says, then read as many."""
    count = int(await connection.recv())
    for number in range(count):
        await connection.send(b"%d" % number)
    await _may_read.wait()
    assert [int(await connection.recv()) for _ in range(count)] == [*range(count)]
    await connection.send(b"read")


async def _serve(listener: Any, handler: Callable[[Any], Awaitable[None]]) -> None:
    async with listener:
        await listener.serve(handler)


async def _serve_datagrams(endpoint: aiordma.DatagramEndpoint) -> None:
    async with endpoint, asyncio.TaskGroup() as tasks:
        tasks.create_task(endpoint.serve(b""))
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
    for function in (
        *(serve_messages, serve_streams, serve_datagrams, listen_only, serve_late),
        *(requests_waiting, read, stall, stop),
    )
}


async def main() -> None:
    print("answer", "null", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments, options = json.loads(line)
        answer = json.dumps(await COMMANDS[name](*arguments, **options))
        print("answer", answer, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
