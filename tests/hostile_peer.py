"""A peer that connects and sends random bytes in place of what the protocol asks for.

It is a process of its own: `main()` attacks servers of messages, of byte streams, of pings and of
datagrams (port 0: there is none) a number of times, and prints "done". All choices come from the
seed.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import mpa

import aiordma
from aiordma import AccessFlags, Connection, ConnectionOptions, RdmaError, RemoteBuffer
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.ping.private_data import announcement
from aiordma.streams.wire import ConnectionData, Control, Op, Segment, pack_message

ATTACK_SECONDS = 3.0
SEND_BYTES = (0, 1, 4, 16, 100, 4096, 5000)
OPTIONS = ConnectionOptions(max_message_size=8192, recv_depth=64, retry_count=2, rnr_retry_count=2)


class Attacker:
    """A source of malformed data, and the attacks with it on the servers of one host."""

    def __init__(self, seed: int, host: str, ports: list[int]) -> None:
        self.chance = random.Random(seed)
        self.host = host
        self.messages, self.streams, self.pings, self.datagrams = ports
        self.is_iwarp = not self.datagrams

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

    def damaged(self, data: bytes) -> bytes:
        """Return `data` unchanged, cut, longer, with some bytes changed, or nothing of it."""
        chance = self.chance
        match chance.randrange(5):
            case 0:
                return data
            case 1:
                return data[: chance.randrange(len(data) + 1)]
            case 2:
                return data + chance.randbytes(chance.randrange(9))
            case 3:
                changed = bytearray(data)
                for _ in range(chance.randrange(1, 4)):
                    changed[chance.randrange(len(changed))] = chance.randrange(256)
                return bytes(changed)
            case _:
                return chance.randbytes(chance.randrange(57))

    def remote(self, known: RemoteBuffer | None = None) -> RemoteBuffer:
        """Return memory of the server: the one that is known, or a guess."""
        if known is not None and self.chance.random() < 0.7:
            return known
        length = self.chance.randrange(1, 5000)
        return RemoteBuffer(self.number(62), self.number(32), length)

    async def attack(self) -> None:
        """Attack one of the servers in one way. Its end may be any error of RDMA."""
        attacks: list[Callable[[], Awaitable[None]]] = [
            self.send_messages,
            self.access_memory,
            self.send_remote_buffers,
            self.send_private_data,
            self.speak_rsocket,
            self.speak_rsocket,
            self.announce_ping,
        ]
        attacks.append(self.send_frames if self.is_iwarp else self.send_datagrams)
        with suppress(RdmaError, OSError, ValueError):
            async with asyncio.timeout(ATTACK_SECONDS):
                await self.chance.choice(attacks)()

    async def send_messages(self) -> None:
        """Send messages of all sizes, too large ones as well, and receive few of the answers."""
        async with self.connect(self.messages) as connection:
            for _ in range(self.chance.randrange(1, 100)):
                data = self.chance.randbytes(self.chance.choice(SEND_BYTES))
                await connection.send(data, imm=self.immediate())
                if self.chance.random() < 0.5:
                    await connection.recv()
            self.leave(connection)

    def immediate(self) -> int | None:
        """Return immediate data, or None."""
        return None if self.is_iwarp or self.chance.random() < 0.5 else self.number(32)

    async def access_memory(self) -> None:
        """Write to and read from memory whose address and key are guessed."""
        async with self.connect(self.messages) as connection:
            await connection.write(self.chance.randbytes(16), self.remote(), imm=self.immediate())

    async def send_remote_buffers(self) -> None:
        """Announce memory that does not exist, is too small, or is unregistered meanwhile."""
        async with self.connect(self.messages) as connection:
            access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
            region = await connection.register(bytearray(64), access)
            remote = region.remote
            for _ in range(self.chance.randrange(1, 20)):
                await connection.send(self.damaged(self.remote(remote).pack()))
                if self.chance.random() < 0.1:
                    await region.aclose()
            await connection.recv()

    async def send_private_data(self) -> None:
        """Connect with random private data, and be gone at once."""
        port = self.chance.choice([self.messages, self.streams, self.pings])
        async with self.connect(port, self.chance.randbytes(self.chance.randrange(57))) as peer:
            self.leave(peer)

    async def announce_ping(self) -> None:
        """Announce pings of any size, and send messages of another."""
        data = self.damaged(announcement(self.number(32)))
        async with self.connect(self.pings, data) as connection:
            for _ in range(self.chance.randrange(1, 10)):
                await connection.send(self.chance.randbytes(self.chance.choice(SEND_BYTES)))
            await connection.recv()

    async def speak_rsocket(self) -> None:
        """Connect as rsocket does, and send messages and write data that need not fit it."""
        own = ConnectionData(
            self.number(16),
            Segment(self.number(62), self.number(32), 2),
            Segment(self.number(62), self.number(32), self.number(20)),
            self.chance.choice(["little", "big"]),
            self.chance.choice([0, 3, 128]),
        )
        async with self.connect(self.streams, self.damaged(own.pack())) as connection:
            peer = ConnectionData.unpack(connection.private_data)
            buffer = RemoteBuffer(peer.buffer.addr, peer.buffer.key, peer.buffer.length)
            targets = RemoteBuffer(peer.targets.addr, peer.targets.key, 16 * peer.targets.length)
            for _ in range(self.chance.randrange(1, 200)):
                await self.send_rsocket(connection, buffer, targets)
            self.leave(connection)

    async def send_rsocket(
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

    async def send_datagrams(self) -> None:
        """Ask for a datagram endpoint with random private data, and send it datagrams."""
        chance = self.chance
        async with aiordma.open_datagram((self.host, 0)) as endpoint:
            private_data = chance.randbytes(chance.randrange(181))
            peer = await endpoint.resolve(self.host, self.datagrams, private_data)
            for _ in range(chance.randrange(1, 300)):
                data = chance.randbytes(chance.randrange(endpoint.max_message_size + 1))
                await endpoint.send_to(peer, data, imm=self.immediate())

    async def send_frames(self) -> None:
        """Speak to iWARP over TCP: a damaged request, then damaged frames."""
        port = self.chance.choice([self.messages, self.streams, self.pings])
        _, writer = await asyncio.open_connection(self.host, port)
        try:
            writer.write(self.damaged(mpa.request()))
            for number in range(1, self.chance.randrange(2, 9)):
                writer.write(self.damaged(mpa.send(self.chance.randbytes(50), number)))
                await asyncio.sleep(self.chance.choice([0, 0.05]))
            await writer.drain()
        finally:
            writer.close()

    def connect(self, port: int, private_data: bytes = b"") -> AwaitableContextManager[Connection]:
        """Connect to a server."""
        return aiordma.connect(self.host, port, options=OPTIONS, private_data=private_data)

    def leave(self, connection: Connection) -> None:
        """Abort the connection, or leave it to be closed."""
        if self.chance.random() < 0.5:
            connection.abort()


async def main(seed: str, attacks: str, host: str, *ports: str) -> None:
    """Attack `attacks` times, and print "done"."""
    attacker = Attacker(int(seed), host, [int(port) for port in ports])
    for _ in range(int(attacks)):
        await attacker.attack()
    print("done", flush=True)
