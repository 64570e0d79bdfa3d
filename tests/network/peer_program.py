"""The program of the peer on another node: servers that a test starts by commands on its input.

Each line of input is a command in JSON, with the name of a function below and its arguments. The
answer is a line of output that begins with "answer ". Other lines are those of the log.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from netlink import rdma_resources

import aiordma
from aiordma import (
    AccessFlags,
    ByteStream,
    Connection,
    ConnectionOptions,
    DatagramOptions,
    ListenerLimits,
    MessageOptions,
    MessageStream,
    StreamOptions,
)
from aiordma.asyncio import start_server
from aiordma.errors import PeerClosed

MEMORY = b"M"
MEMORY_SIZE = 1 << 20
SETTLE_SECONDS = 100
_tasks: set[asyncio.Task[None]] = set()
_listeners: list[Any] = []
"""The listener that was made last."""
_may_read = asyncio.Event()
_held: list[Any] = []
"""The connections, streams, readers and endpoints that only the commands use."""
_is_held = asyncio.Event()
_may_close = asyncio.Event()
_log: list[str] = []


async def serve_messages(
    host: str, port: int = 0, handshake_timeout: float = 10.0, **options: Any
) -> int:
    """Serve connections. Return the port."""
    limits = ListenerLimits(handshake_timeout=handshake_timeout)
    connection_options = ConnectionOptions(**options)
    listener = await aiordma.listen(host, port, options=connection_options, limits=limits)
    return _started(listener, _serve(listener, answer_messages))


async def serve_streams(host: str, port: int = 0, **options: Any) -> int:
    """Serve byte streams, which are sent back. Return the port."""
    listener = await aiordma.listen_stream(host, port, options=StreamOptions(**options))
    return _started(listener, _serve(listener, answer_stream))


async def serve_any_size(host: str, port: int = 0, **options: Any) -> int:
    """Serve messages of any size, which are sent back. Return the port."""
    message_options = MessageOptions(connection=ConnectionOptions(**options))
    listener = await aiordma.listen_messages(host, port, options=message_options)
    return _started(listener, _serve(listener, answer_any_size))


async def serve_datagrams(host: str) -> int:
    """Serve datagrams, which are sent back. Return the port."""
    endpoint = await aiordma.open_datagram((host, 0))
    endpoint.listen()
    _keep(_serve_datagrams(endpoint))
    return endpoint.local_address[1]


async def listen_only(host: str) -> int:
    """Listen, and answer no request. Return the port."""
    listener = await aiordma.listen(host, 0)
    return _started(listener, _wait_for_ever(listener))


async def listener_stats() -> dict[str, int]:
    """Return the counters of the listener that was made last."""
    return asdict(_listeners[0].stats)


async def hold_connections(host: str, **options: Any) -> int:
    """Serve connections that only the commands `receive()` and `close()` use. Return the port."""
    _is_held.clear()
    listener = await aiordma.listen(host, 0, options=ConnectionOptions(**options))
    return _started(listener, _serve(listener, _hold))


async def hold_streams(host: str, **options: Any) -> int:
    """Serve byte streams that only the commands below use. Return the port."""
    _is_held.clear()
    listener = await aiordma.listen_stream(host, 0, options=StreamOptions(**options))
    return _started(listener, _serve(listener, _hold))


async def hold_readers(host: str) -> int:
    """Serve asyncio streams that only the command `receive()` uses. Return the port."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        _store(reader)

    async def serve() -> None:
        async with server:
            try:
                await _may_close.wait()
            finally:
                server.abort_clients()

    _is_held.clear()
    writers: list[asyncio.StreamWriter] = []  # a reader alone would lose its transport
    server = await start_server(hold, host, 0)
    _keep(serve())
    port: int = server.sockets[0].getsockname()[1]
    return port


async def hold_datagrams(host: str, **options: Any) -> int:
    """Open a datagram endpoint that only `receive_datagrams()` reads. Return the port."""
    endpoint = await aiordma.open_datagram((host, 0), options=DatagramOptions(**options))
    endpoint.listen()
    _held.append(endpoint)
    _keep(_answer_requests(endpoint))
    return endpoint.local_address[1]


async def until_held() -> None:
    """Wait until the listener that was made last has a connection that the commands can use."""
    await _is_held.wait()


async def receive(count: int) -> str:
    """Receive messages, or bytes of a stream. Return the hash of all of them."""
    received = hashlib.sha256()
    match _held[-1]:
        case ByteStream() as stream:
            while count:
                data = await stream.receive(count)
                count -= len(data)
                received.update(data)
        case asyncio.StreamReader() as reader:
            received.update(await reader.readexactly(count))
        case Connection() as connection:
            for _ in range(count):
                received.update(await connection.recv())
    return received.hexdigest()


async def unread() -> int:
    """Return the number of messages, or of bytes of a stream, that have arrived and wait."""
    held = _held[-1]
    if isinstance(held, Connection):
        return held.stats.messages_unread
    available: int = held._core.data_path.protocol.inbound.available
    return available


async def receive_datagrams(last: str) -> list[str]:
    """Receive datagrams until one is `last`. Return all of them, in hexadecimal digits."""
    endpoint, received = _held[-1], [""]
    while received[-1] != last:
        received.append((await endpoint.recv_from()).data.hex())
    return received[1:]


async def send_eof() -> None:
    """Finish sending on the byte stream that was held last."""
    await _held[-1].send_eof()


async def close() -> None:
    """Begin to close all connections and streams that are held."""
    _may_close.set()


async def connect_to(host: str, port: int) -> None:
    """Begin to connect, and answer messages then."""

    async def run() -> None:
        with suppress(aiordma.RdmaError):
            async with await aiordma.connect(host, port) as connection:
                await answer_messages(connection)

    _keep(run())


async def use_once(host: str, port: int) -> None:
    """Connect, have one message sent back, and close."""
    async with await aiordma.connect(host, port) as connection:
        await connection.send(b"once")
        assert await connection.recv() == b"once"


async def attempt(name: str, *arguments: object) -> tuple[str, int | None, str] | None:
    """Perform a command. Return the type, the errno and the text of its error, or None."""
    try:
        await COMMANDS[name](*arguments)
    except aiordma.RdmaError as error:
        return type(error).__name__, getattr(error, "errno", None), str(error)
    return None


async def logged() -> list[str]:
    """Return the warnings and errors that were logged since the last call."""
    texts = _log[:]
    _log.clear()
    return texts


async def lowest_free_descriptor() -> int:
    """Return the number that the next descriptor will have."""
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


async def serve_late(host: str) -> int:
    """Serve connections that send a burst at once, and read only after `read()`."""
    _may_read.clear()
    listener = await aiordma.listen(host, 0)
    return _started(listener, _serve(listener, burst))


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
    _held.clear()
    _may_close.clear()
    _log.clear()
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


async def answer_any_size(stream: MessageStream) -> None:
    """Send messages back, until the peer ends its half."""
    while True:
        try:
            message = await stream.recv_message()
        except PeerClosed:
            break
        with message:
            await stream.send(message.frames)
    await stream.send_eof()


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


async def _hold(connection: Connection | ByteStream) -> None:
    _store(connection)
    await _may_close.wait()


def _store(held: object) -> None:
    """Let the commands use an object."""
    _held.append(held)
    _is_held.set()


async def _answer_requests(endpoint: aiordma.DatagramEndpoint) -> None:
    async with endpoint:
        await endpoint.serve(b"")


async def _serve_datagrams(endpoint: aiordma.DatagramEndpoint) -> None:
    async with endpoint, asyncio.TaskGroup() as tasks:
        tasks.create_task(endpoint.serve(b""))
        while True:
            datagram = await endpoint.recv_from()
            await endpoint.send_to(datagram.peer, datagram.data)


async def _wait_for_ever(listener: aiordma.Listener) -> None:
    async with listener:
        await asyncio.get_running_loop().create_future()


def _started(listener: Any, work: Awaitable[None]) -> int:
    """Run the work of a listener, and return the port."""
    _listeners[:] = [listener]
    _keep(work)
    port: int = listener.local_address[1]
    return port


def _keep(work: Awaitable[None]) -> None:
    async def run() -> None:
        await work

    task = asyncio.create_task(run())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


COMMANDS: dict[str, Callable[..., Awaitable[object]]] = {
    function.__name__: function
    for function in (
        *(serve_messages, serve_streams, serve_any_size, serve_datagrams, listen_only, serve_late),
        *(hold_connections, hold_streams, hold_readers, hold_datagrams),
        *(until_held, receive, receive_datagrams, unread, send_eof, close, read, stall, stop),
        *(connect_to, use_once, attempt, listener_stats, logged, lowest_free_descriptor),
    )
}


class _LogRecorder(logging.Handler):
    """Stores the texts of records, which `logged()` returns."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.append(record.getMessage())


async def main() -> None:
    logging.basicConfig(level=logging.WARNING, handlers=[logging.StreamHandler(), _LogRecorder()])
    print("answer", "null", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments, options = json.loads(line)
        answer = json.dumps(await COMMANDS[name](*arguments, **options))
        print("answer", answer, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
