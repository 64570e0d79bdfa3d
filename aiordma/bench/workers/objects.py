"""Objects: messages that are received whole, by MessageStream and by TCP with their sizes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Protocol

import aiordma
from aiordma import AccessFlags, ConnectionOptions, MessageOptions, MessageStream
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers.timing import time_all, time_round_trips

DONE = b"done"
_SIZE = struct.Struct(">Q")


class Objects(Protocol):
    """One end of a connection for objects."""

    async def prepare(self, nbytes: int) -> None:
        """Prepare an object of `nbytes` bytes to be sent by send_all()."""

    async def send_all(self, count: int) -> None:
        """Send the prepared object `count` times."""

    async def send(self, data: bytes) -> None:
        """Send a small object."""

    async def receive(self) -> int:
        """Receive an object, and return its size."""

    async def receive_small(self) -> bytes:
        """Receive a small object."""

    async def aclose(self) -> None:
        """Close the connection."""


class MessageStreamAdapter:
    """Objects over a MessageStream, from registered memory or from bytes."""

    def __init__(self, stream: MessageStream, *, registers: bool) -> None:
        self._stream, self._registers = stream, registers
        self.send, self.receive_small = stream.send, stream.recv
        self.aclose = stream.aclose

    async def prepare(self, nbytes: int) -> None:
        """See Objects."""
        if self._registers:
            access = AccessFlags.REMOTE_READ
            self._object = (await self._stream.allocate(nbytes, access))[:]
        else:
            self._bytes = bytes(nbytes)

    async def send_all(self, count: int) -> None:
        """See Objects."""
        for _ in range(count):
            self._stream.send_soon(self._object if self._registers else self._bytes)
        await self._stream.drain()

    async def receive(self) -> int:
        """See Objects. A large one is not copied."""
        with await self._stream.recv_message() as message:
            return message.nbytes


class SizedAdapter:
    """Objects over asyncio's reader and writer: each is sent with its size, and read whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def prepare(self, nbytes: int) -> None:
        """See Objects."""
        self._bytes = bytes(nbytes)

    async def send_all(self, count: int) -> None:
        """See Objects."""
        for _ in range(count):
            await self.send(self._bytes)

    async def send(self, data: bytes) -> None:
        """See Objects."""
        self._writer.write(_SIZE.pack(len(data)))
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> int:
        """See Objects."""
        return len(await self.receive_small())

    async def receive_small(self) -> bytes:
        """See Objects."""
        (nbytes,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
        return await self._reader.readexactly(nbytes)

    async def aclose(self) -> None:
        """See Objects."""
        self._writer.close()
        await self._writer.wait_closed()


async def serve_objects(objects: Objects, work: Work) -> None:
    """Serve the client of a connection."""
    if work.test == "latency":
        message = bytes(work.size)
        for _ in range(work.warmup + work.count):
            await objects.receive_small()
            await objects.send(message)
    else:
        for count in (work.warmup, work.count):
            for _ in range(count):
                assert await objects.receive() == work.size
            await objects.send(DONE)
    await objects.receive_small()  # when the client has the last answer
    await objects.aclose()


async def measure_objects(objects: Objects, work: Work) -> Sample:
    """Do the work as the client of a connection, then close it."""
    message = bytes(work.size)

    async def exchange() -> None:
        await objects.send(message)
        await objects.receive_small()

    async def send(count: int) -> None:
        await objects.send_all(count)
        await objects.receive_small()

    if work.test == "latency":
        sample = await time_round_trips(exchange, work.count, work.warmup)
    else:
        await objects.prepare(work.size)
        await send(work.warmup)
        sample = await time_all(lambda: send(work.count), work.count, work.size / 1e6)
    await objects.send(DONE)
    await objects.aclose()
    return sample


def options_for(work: Work) -> MessageOptions:
    """Return the options of both ends."""
    return MessageOptions(connection=ConnectionOptions(busy_poll=work.busy_poll))


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client on a MessageStream."""
    async with aiordma.listen_messages(host, 0, options=options_for(work)) as listener:
        announce(listener.local_address[1])
        stream = await listener.accept()
        await serve_objects(MessageStreamAdapter(stream, registers=True), work)


async def measure(host: str, port: int, work: Work) -> Sample:
    """Connect a MessageStream and send objects of registered memory."""
    stream = await aiordma.connect_messages(host, port, options=options_for(work))
    return await measure_objects(MessageStreamAdapter(stream, registers=True), work)


async def measure_bytes(host: str, port: int, work: Work) -> Sample:
    """Connect a MessageStream and send bytes, which are registered for each message."""
    stream = await aiordma.connect_messages(host, port, options=options_for(work))
    return await measure_objects(MessageStreamAdapter(stream, registers=False), work)


async def serve_tcp(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client over TCP."""
    accepted: asyncio.Future[Objects] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda reader, writer: accepted.set_result(SizedAdapter(reader, writer)), host, 0
    )
    announce(server.sockets[0].getsockname()[1])
    objects = await accepted
    server.close()
    await serve_objects(objects, work)


async def measure_tcp(host: str, port: int, work: Work) -> Sample:
    """Connect over TCP and send objects with their sizes."""
    ends = await asyncio.open_connection(host, port)
    return await measure_objects(SizedAdapter(*ends), work)
