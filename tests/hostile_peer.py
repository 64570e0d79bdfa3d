"""A peer that connects and sends random bytes in place of what the protocol asks for.

As a process of its own it attacks servers of messages, of byte streams, of pings and of datagrams,
and then prints its counts. All choices come from the seed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass

import mpa
from malformed import MAX_PRIVATE_DATA, OPTIONS, Malformed

import aiordma
from aiordma import Connection, ProtocolError, RdmaError

ATTACK_SECONDS = 3.0


@dataclass(frozen=True)
class Targets:
    """The servers of a host: their ports by what they serve."""

    host: str
    is_iwarp: bool
    messages: list[int]
    streams: list[int]
    pings: list[int]
    datagrams: list[int]
    has_tcp: bool = True
    """False for simulated devices, which have no TCP below iWARP."""


class Attacker(Malformed):
    """Attacks servers."""

    def __init__(self, seed: int, targets: Targets) -> None:
        super().__init__(seed, is_iwarp=targets.is_iwarp)
        self.targets = targets
        self.attacks: Counter[str] = Counter()
        """The number of attacks of each kind."""
        self.connected: Counter[str] = Counter()
        """The number of those that the server accepted."""
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self.send_to_messages,
            self.access_guessed_memory,
            self.announce_memory,
            self.send_private_data,
            self.connect_streams,
            self.connect_streams,
            self.announce_ping,
        ]
        if targets.datagrams:
            self._kinds.append(self.send_datagrams)
        if targets.is_iwarp and targets.has_tcp:
            self._kinds.append(self.send_frames)
        self._kind = ""

    async def attack(self) -> None:
        """Attack one of the servers in one way. Its end may be any error of RDMA."""
        call = self.chance.choice(self._kinds)
        self._kind = call.__name__
        self.attacks[self._kind] += 1
        with suppress(RdmaError, OSError, ValueError, EOFError):
            async with asyncio.timeout(ATTACK_SECONDS):
                await call()

    @asynccontextmanager
    async def connection(
        self, ports: list[int], private_data: bytes = b""
    ) -> AsyncIterator[Connection]:
        """Connect to one of the servers."""
        port = self.chance.choice(ports)
        async with aiordma.connect(
            self.targets.host, port, options=OPTIONS, private_data=private_data
        ) as connection:
            self.connected[self._kind] += 1
            yield connection

    async def send_to_messages(self) -> None:
        """Send messages of all sizes."""
        async with self.connection(self.targets.messages) as connection:
            await self.send_messages(connection)
            self.leave(connection)

    async def access_guessed_memory(self) -> None:
        """Write to memory whose address and key are guessed."""
        async with self.connection(self.targets.messages) as connection:
            await self.access_memory(connection)

    async def announce_memory(self) -> None:
        """Announce memory that does not exist, is too small, or is unregistered meanwhile."""
        async with self.connection(self.targets.messages) as connection:
            await self.send_remote_buffers(connection)

    async def send_private_data(self) -> None:
        """Connect with random private data, and be gone at once."""
        ports = self.targets.messages + self.targets.streams + self.targets.pings
        async with self.connection(ports, self.random_bytes(MAX_PRIVATE_DATA)) as peer:
            self.leave(peer)

    async def announce_ping(self) -> None:
        """Announce pings of any size, and send messages of another."""
        async with self.connection(self.targets.pings, self.ping_announcement()) as connection:
            await self.send_messages(connection)

    async def connect_streams(self) -> None:
        """Connect as rsocket does, and send messages and write data that need not fit it."""
        async with self.connection(self.targets.streams, self.connection_data()) as connection:
            with suppress(ProtocolError):  # a server that serves messages has answered
                await self.speak_rsocket(connection)
            self.leave(connection)

    async def send_datagrams(self) -> None:
        """Ask for a datagram endpoint with random private data, and send it datagrams."""
        chance, port = self.chance, self.chance.choice(self.targets.datagrams)
        async with aiordma.open_datagram((self.targets.host, 0)) as endpoint:
            peer = await endpoint.resolve(self.targets.host, port, self.random_bytes(180))
            self.connected[self._kind] += 1
            for _ in range(chance.randrange(1, 300)):
                data = chance.randbytes(chance.randrange(endpoint.max_message_size + 1))
                await endpoint.send_to(peer, data, imm=self.immediate())

    async def send_frames(self) -> None:
        """Speak to iWARP over TCP: a request, and then damaged frames.

        Other requests are left out, as is a TCP connection that is closed before the reply: siw
        does not survive them. See docs/security.md and tests/network/test_iwarp.py.
        """
        targets = self.targets
        port = self.chance.choice(targets.messages + targets.streams + targets.pings)
        reader, writer = await asyncio.open_connection(targets.host, port)
        try:
            writer.write(mpa.request())
            await mpa.read_reply(reader)
            self.connected[self._kind] += 1
            for number in range(1, self.chance.randrange(2, 9)):
                writer.write(self.damaged(mpa.send(self.chance.randbytes(50), number)))
                await asyncio.sleep(self.chance.choice([0, 0.05]))
            await writer.drain()
        finally:
            writer.close()


def arguments_of(seed: int, attacks: int, targets: Targets) -> tuple[str, str, str]:
    """Return the arguments of main()."""
    return str(seed), str(attacks), json.dumps(asdict(targets))


async def main(seed: str, attacks: str, targets: str) -> None:
    """Attack `attacks` times, and print both counts as JSON in one line."""
    attacker = Attacker(int(seed), Targets(**json.loads(targets)))
    for _ in range(int(attacks)):
        await attacker.attack()
    print(json.dumps([attacker.attacks, attacker.connected]), flush=True)
