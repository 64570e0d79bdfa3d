"""Malformed data, and how a hostile end of an open connection sends it.

All choices come from a seed. hostile_peer.py connects to servers, hostile_listener.py accepts
clients.
"""

from __future__ import annotations

import random
import struct

from aiordma import AccessFlags, Connection, ConnectionOptions, RemoteBuffer
from aiordma.ping.private_data import announcement
from aiordma.streams.wire import ConnectionData, Control, Op, Segment, pack_message

SEND_BYTES = (0, 1, 4, 16, 100, 4096, 5000)
OPTIONS = ConnectionOptions(max_message_size=8192, recv_depth=64, retry_count=2, rnr_retry_count=2)
MAX_PRIVATE_DATA = 56
"""The number of bytes that fit in each message of the connection manager."""


class Malformed:
    """A source of malformed data."""

    def __init__(self, seed: object, *, is_iwarp: bool) -> None:
        self.chance = random.Random(f"{seed}")
        self.is_iwarp = is_iwarp

    def number(self, bits: int) -> int:
        """Return a number: small, near the largest one, or any."""
        last = (1 << bits) - 1
        return self.chance.choice(
            [
                self.chance.randrange(5),
                self.chance.randrange(0, min(last, 70_000)),
                last - self.chance.randrange(100),
                self.chance.randrange(last + 1),
            ]
        )

    def random_bytes(self, at_most: int) -> bytes:
        """Return random bytes, up to `at_most`."""
        return self.chance.randbytes(self.chance.randrange(at_most + 1))

    def damaged(self, data: bytes) -> bytes:
        """Return `data` unchanged, cut, longer, with some bytes changed, or nothing of it."""
        chance = self.chance
        match chance.randrange(5):
            case 0:
                return data
            case 1:
                return data[: chance.randrange(len(data) + 1)]
            case 2:
                return data + self.random_bytes(8)
            case 3:
                changed = bytearray(data)
                for _ in range(chance.randrange(1, 4)):
                    changed[chance.randrange(len(changed))] = chance.randrange(256)
                return bytes(changed)
            case _:
                return self.random_bytes(MAX_PRIVATE_DATA)

    def remote(self, known: RemoteBuffer | None = None) -> RemoteBuffer:
        """Return memory of the other end: the one that is known, or a guess."""
        if known is not None and self.chance.random() < 0.7:
            return known
        length = self.chance.randrange(1, 5000)
        return RemoteBuffer(self.number(62), self.number(32), length)

    def immediate(self) -> int | None:
        """Return immediate data, or None."""
        return None if self.is_iwarp or self.chance.random() < 0.5 else self.number(32)

    def ping_announcement(self) -> bytes:
        """Return the private data of a ping with messages of any size."""
        return self.damaged(announcement(self.number(32)))

    def connection_data(self) -> bytes:
        """Return the private data of a byte stream, with memory that does not exist."""
        own = ConnectionData(
            self.number(16),
            Segment(self.number(62), self.number(32), 2),
            Segment(self.number(62), self.number(32), self.number(20)),
            self.chance.choice(["little", "big"]),
            self.chance.choice([0, 3, 128]),
        )
        return self.damaged(own.pack())

    # --- on an open connection ---

    async def send_messages(self, connection: Connection) -> None:
        """Send messages of all sizes, too large ones as well, and receive few of the answers."""
        for _ in range(self.chance.randrange(1, 100)):
            data = self.chance.randbytes(self.chance.choice(SEND_BYTES))
            await connection.send(data, imm=self.immediate())
            if self.chance.random() < 0.5:
                await connection.recv()

    async def access_memory(self, connection: Connection) -> None:
        """Write to memory whose address and key are guessed."""
        await connection.write(self.chance.randbytes(16), self.remote(), imm=self.immediate())

    async def send_remote_buffers(self, connection: Connection) -> None:
        """Announce memory that does not exist, is too small, or is unregistered meanwhile."""
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
        region = await connection.register(bytearray(64), access)
        remote = region.remote
        for _ in range(self.chance.randrange(1, 20)):
            await connection.send(self.damaged(self.remote(remote).pack()))
            if self.chance.random() < 0.1:
                await region.aclose()
        await connection.recv()

    async def speak_rsocket(self, connection: Connection) -> None:
        """Send messages of rsocket, and write data, that need not fit the connection data."""
        peer = ConnectionData.unpack(connection.private_data)
        buffer = RemoteBuffer(peer.buffer.addr, peer.buffer.key, peer.buffer.length)
        targets = RemoteBuffer(peer.targets.addr, peer.targets.key, 16 * peer.targets.length)
        for _ in range(self.chance.randrange(1, 200)):
            await self._send_rsocket(connection, buffer, targets)

    async def _send_rsocket(
        self, connection: Connection, buffer: RemoteBuffer, targets: RemoteBuffer
    ) -> None:
        """Send one message, with or without data, or overwrite targets, or send bytes."""
        message = self.rsocket_message()
        swapped = struct.pack(self.chance.choice("<>") + "I", message)
        match self.chance.randrange(6):
            case 0:
                entry = struct.pack("<QII", self.number(62), self.number(32), self.number(20))
                at = self.chance.randrange(17)
                await connection.write(entry, targets[at:])
            case 1:
                await connection.send(self.chance.randbytes(self.chance.randrange(1, 16)))
            case 2 | 3 if not self.is_iwarp:
                data = self.chance.randbytes(self.chance.randrange(2000))
                at = self.chance.randrange(len(buffer) - 2000)
                await connection.write(data, buffer[at:], imm=message)
            case 2 | 3:
                await connection.write(self.chance.randbytes(100), buffer)
                await connection.send(swapped)
            case _ if self.is_iwarp:
                await connection.send(swapped)
            case _:
                await connection.send(b"", imm=message)

    def rsocket_message(self) -> int:
        """Return a message: often one of data or credits with a likely value."""
        match self.chance.randrange(4):
            case 0:
                return pack_message(Op.DATA, self.chance.randrange(200_000))
            case 1:
                return pack_message(Op.CREDIT, self.number(16))
            case 2:
                control = self.chance.choice([*Control, 3, 77])
                return pack_message(Op.CONTROL, control if self.chance.random() < 0.3 else 1)
            case _:
                return self.number(32)

    def leave(self, connection: Connection) -> None:
        """Abort the connection, or leave it to be closed."""
        if self.chance.random() < 0.5:
            connection.abort()
