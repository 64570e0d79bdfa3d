"""Run a key-value cache whose clients read by RDMA READ, without the server's processor.

    python examples/kv_cache.py serve [--host HOST] [--port PORT] [--slots N]
    python examples/kv_cache.py put HOST PORT KEY VALUE
    python examples/kv_cache.py get HOST PORT KEY
    python examples/kv_cache.py delete HOST PORT KEY

The server has a table of slots in registered memory, and changes the table when a client sends a
message. A client computes the slot of a key from a hash, and reads that slot. The server can write
to it at the same moment, so a read is valid only if the version is even and the checksum right.
"""

import argparse
import asyncio
import contextlib
import functools
import mmap
import os
import struct
import sys
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import aiordma

SLOT_SIZE = 512
PROBES = 8  # a key is in one of this many slots, starting at the slot of its hash
ATTEMPTS = 100
CONCURRENT_GETS = 16
OPTIONS = aiordma.ConnectionOptions(recv_depth=4, max_message_size=SLOT_SIZE)

HEADER = struct.Struct(">QHHI")  # version, lengths of key and value, checksum of the rest
SUMMED = struct.Struct(">QHH")
VERSION = struct.Struct(">Q")
REQUEST = struct.Struct(">cH")  # operation, length of the key; then the key and the value
PUT, DELETE = b"p", b"d"
YES, NO = b"y", b"n"


class TornRead(Exception):
    """The server was writing to the slot during every read."""


# --- the table, for both sides ---


@dataclass(frozen=True)
class Slot:
    """The content of a slot: unused (version 0), a key and its value, or a deleted key (b"")."""

    version: int
    key: bytes = b""
    value: bytes = b""

    def pack(self) -> bytes:
        lengths = len(self.key), len(self.value)
        content = self.key + self.value
        checksum = zlib.crc32(SUMMED.pack(self.version, *lengths) + content)
        return HEADER.pack(self.version, *lengths, checksum) + content

    @classmethod
    def unpack(cls, memory: bytes | memoryview) -> Self | None:
        """Return the slot in `memory`; None if a write was in progress when it was read."""
        version, key_length, value_length, checksum = HEADER.unpack_from(memory)
        content = bytes(memory[HEADER.size : HEADER.size + key_length + value_length])
        summed = zlib.crc32(SUMMED.pack(version, key_length, value_length) + content)
        if version % 2 or summed != checksum:
            return None
        return cls(version, content[:key_length], content[key_length:])


def check_fits(key: bytes, value: bytes) -> None:
    available = SLOT_SIZE - HEADER.size
    if not key:
        raise ValueError("the key is empty")
    if len(key) + len(value) > available:
        raise ValueError(f"key and value have more than {available} bytes together")


def positions_of(key: bytes, slots: int) -> list[int]:
    """Return the slots that can have the key, in the order of the search."""
    first = zlib.crc32(key)
    return [(first + probe) % slots for probe in range(min(PROBES, slots))]


# --- the server ---


class Table:
    """The slots. One thread writes to them, and any number of devices can read at any moment."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.memory = memoryview(mmap.mmap(-1, slots * SLOT_SIZE))
        self.memory[:] = Slot(0).pack().ljust(SLOT_SIZE, b"\0") * slots
        self._version = 0

    def put(self, key: bytes, value: bytes) -> None:
        """Write to the slot that has the key, else to a free slot, else to the oldest one."""

        def preference(position: int) -> tuple[bool, bool, int]:
            slot = self._slot(position)
            return slot.key != key, slot.key != b"", slot.version

        check_fits(key, value)
        self._write(min(positions_of(key, self.slots), key=preference), key, value)

    def delete(self, key: bytes) -> bool:
        """Delete the key. Return True if it existed."""
        for position in positions_of(key, self.slots):
            if self._slot(position).key == key:
                self._write(position, b"", b"")
                return True
        return False

    def _slot(self, position: int) -> Slot:
        slot = Slot.unpack(self.memory[position * SLOT_SIZE :])
        assert slot is not None  # only this thread writes
        return slot

    def _write(self, position: int, key: bytes, value: bytes) -> None:
        self._version += 2
        packed = Slot(self._version, key, value).pack()
        slot = self.memory[position * SLOT_SIZE :][: len(packed)]
        # The odd version makes readers try again. It does not help a reader that has started
        # before, or whose device reads the slot in another order: that one needs the checksum.
        VERSION.pack_into(slot, 0, self._version - 1)
        slot[HEADER.size :] = packed[HEADER.size :]
        slot[: HEADER.size] = packed[: HEADER.size]


def apply(table: Table, request: bytes) -> bytes:
    """Execute a request of a client and return the answer."""
    if len(request) < REQUEST.size:
        raise ValueError(f"a request of {len(request)} bytes")
    operation, key_length = REQUEST.unpack_from(request)
    content = request[REQUEST.size :]
    key, value = content[:key_length], content[key_length:]
    if operation == PUT:
        table.put(key, value)
        return YES
    if operation == DELETE and key:
        return YES if table.delete(key) else NO
    raise ValueError(f"an unknown request {request[:1]!r}")


async def serve_client(connection: aiordma.Connection, table: Table) -> None:
    try:
        # Register for each client, because each can have connected through another device.
        with await connection.register(table.memory, aiordma.AccessFlags.REMOTE_READ) as region:
            await connection.recv()  # on iWARP, the connecting side must send first
            await connection.send(region.remote.pack())
            async for request in connection:
                await connection.send(apply(table, request))
    except (aiordma.RdmaError, ValueError) as error:
        print(f"kv_cache: {connection.peer_address[0]}: {error}", file=sys.stderr)


async def serve(host: str | None, port: int, slots: int) -> None:
    table = Table(slots)
    async with aiordma.listen(host, port, options=OPTIONS) as listener:
        print(f"listening on port {listener.local_address[1]}", flush=True)
        await listener.serve(functools.partial(serve_client, table=table))


# --- the client ---


class Cache:
    """A client, created by open_cache(). Any number of tasks can use it."""

    def __init__(
        self,
        connection: aiordma.Connection,
        table: aiordma.RemoteBuffer,
        memory: aiordma.MemoryRegion,
    ) -> None:
        self._connection = connection
        self._table = table
        self._slots = len(table) // SLOT_SIZE
        self._request_lock = asyncio.Lock()
        self._free: asyncio.Queue[aiordma.MemorySlice] = asyncio.Queue()
        for start in range(0, len(memory), SLOT_SIZE):
            self._free.put_nowait(memory[start : start + SLOT_SIZE])

    async def get(self, key: bytes) -> bytes | None:
        """Return the value; None if there is no such key.

        Raises:
            TornRead: the server was writing to the slot during every read.
        """
        for position in positions_of(key, self._slots):
            slot = await self._read(position)
            if slot.key == key:
                return slot.value
            if not slot.version:  # unused: put() would have used it before the next ones
                break
        return None

    async def put(self, key: bytes, value: bytes) -> None:
        """Set the value of a key.

        Raises:
            ValueError: the key is empty, or key and value are too long.
        """
        check_fits(key, value)
        await self._request(PUT, key, value)

    async def delete(self, key: bytes) -> bool:
        """Delete a key. Return True if it existed."""
        check_fits(key, b"")
        return await self._request(DELETE, key) == YES

    async def _read(self, position: int) -> Slot:
        remote = self._table[position * SLOT_SIZE :][:SLOT_SIZE]
        into = await self._free.get()
        try:
            for _ in range(ATTEMPTS):
                await self._connection.read(remote, into)
                slot = Slot.unpack(into.view)
                if slot is not None:
                    return slot
        finally:
            # After a cancellation the device can still write to this memory. That is safe: the
            # reads of a connection complete in order, so that write precedes the next read here.
            self._free.put_nowait(into)
        raise TornRead(f"slot {position} was inconsistent in each of {ATTEMPTS} reads")

    async def _request(self, operation: bytes, key: bytes, value: bytes = b"") -> bytes:
        # Shielded: otherwise a cancelled task would leave its answer for the next task to receive.
        request = REQUEST.pack(operation, len(key)) + key + value
        return await asyncio.shield(self._exchange(request))

    async def _exchange(self, request: bytes) -> bytes:
        async with self._request_lock:
            await self._connection.send(request)
            return await self._connection.recv()


@contextlib.asynccontextmanager
async def open_cache(host: str, port: int) -> AsyncIterator[Cache]:
    async with aiordma.connect(host, port, options=OPTIONS) as connection:
        await connection.send(b"")
        table = aiordma.RemoteBuffer.unpack(await connection.recv())
        if not table or len(table) % SLOT_SIZE:
            raise ValueError(f"a table of {len(table)} bytes has no slots of {SLOT_SIZE}")
        size, access = CONCURRENT_GETS * SLOT_SIZE, connection.read_access
        with await connection.allocate(size, access) as memory:
            yield Cache(connection, table, memory)


# --- the command line ---


async def run_client(arguments: argparse.Namespace) -> None:
    key = os.fsencode(arguments.key)
    async with open_cache(arguments.host, arguments.port) as cache:
        if arguments.command == "put":
            await cache.put(key, os.fsencode(arguments.value))
        elif arguments.command == "delete":
            if not await cache.delete(key):
                raise KeyError(arguments.key)
        else:
            value = await cache.get(key)
            if value is None:
                raise KeyError(arguments.key)
            sys.stdout.buffer.write(value + b"\n")


def slot_count(text: str) -> int:
    number = int(text)
    if not 0 < number * SLOT_SIZE < 1 << 32:  # the limit of a RemoteBuffer
        raise argparse.ArgumentTypeError(f"a table cannot have {number} slots")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="run the server")
    serving.add_argument("--host", help="an RDMA address of this machine (default: all)")
    serving.add_argument(
        "--port", type=int, default=7476, help="default: %(default)s; 0: any free port"
    )
    serving.add_argument("--slots", type=slot_count, default=4096, help="default: %(default)s")
    for name, help_text in (
        ("put", "set the value of a key"),
        ("get", "print the value of a key"),
        ("delete", "delete a key"),
    ):
        client = commands.add_parser(name, help=help_text)
        client.add_argument("host")
        client.add_argument("port", type=int)
        client.add_argument("key")
        if name == "put":
            client.add_argument("value")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if arguments.command == "serve":
                asyncio.run(serve(arguments.host, arguments.port, arguments.slots))
            else:
                asyncio.run(run_client(arguments))
    except KeyError as error:
        sys.exit(f"kv_cache: there is no key {error}")
    except (aiordma.RdmaError, TornRead, ValueError) as error:
        sys.exit(f"kv_cache: {error}")


if __name__ == "__main__":
    main()
