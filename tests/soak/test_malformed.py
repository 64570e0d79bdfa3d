"""Peers that send random private data, messages, immediate data, announcements and iWARP frames.

One process serves messages, byte streams, pings and datagrams. Another one, whose random choices
come from a seed, attacks it. After each round a well-behaved peer of each kind must be served. At
the end, the log has at most one record of each kind for each LOG_SECONDS, and the process has not
grown. AIORDMA_SOAK_FUZZ_SECONDS is the time on each device (default 300).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from helpers import TIME_LIMIT, end, read_line, start_python

import aiordma
from aiordma import ByteStream, Connection, ConnectionOptions, DatagramEndpoint, RemoteBuffer
from aiordma.cm.occasional_log import LOG_SECONDS
from aiordma.enums import TransportType
from aiordma.loop.context_managers import Closable
from aiordma.ping import server as ping
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.asyncio

SECONDS = float(os.environ.get("AIORDMA_SOAK_FUZZ_SECONDS", "300"))
ATTACKS_IN_A_ROUND = 60
OPTIONS = ConnectionOptions(max_message_size=4096, recv_depth=16)
# Of the process while it is attacked, after the first rounds.
MAX_GROWTH = 64 << 20
GROWTH_STARTS_AFTER = 4

TESTS = Path(__file__).parent.parent

ATTACKER = """
import asyncio, sys
sys.path.insert(0, sys.argv.pop(1))
import hostile_peer
asyncio.run(hostile_peer.main(*sys.argv[1:]))
"""


async def obey(connection: Connection) -> None:
    """Echo each message. One that is a packed RemoteBuffer is written to and read from instead."""
    async with await connection.register(bytearray(64), connection.read_access) as region:
        async for message in connection:
            try:
                remote = RemoteBuffer.unpack(message)
            except ValueError:
                await connection.send(message)
            else:
                await connection.write(b"you asked for it"[: len(remote)], remote)
                await connection.read(remote[: len(region)], region)


async def echo_stream(stream: ByteStream) -> None:
    """Echo the bytes of a stream."""
    while data := await stream.receive():
        await stream.send(data)
    await stream.send_eof()


async def echo_datagrams(endpoint: DatagramEndpoint) -> None:
    """Echo each datagram, until the endpoint is closed."""
    async for datagram in endpoint:
        await endpoint.send_to(datagram.peer, datagram.data)


async def call_datagrams(host: str, port: int) -> None:
    """Send datagrams, which can be lost, until one is answered."""
    async with aiordma.open_datagram((host, 0)) as endpoint:
        peer = await endpoint.resolve(host, port)
        answer = asyncio.create_task(endpoint.recv_from())
        while not answer.done():
            await endpoint.send_to(peer, b"hello")
            await asyncio.wait([answer], timeout=0.1)
        assert (await answer).data == b"hello"


class Servers:
    """The servers of one address, each in a task. Their ports, in the order of the attacker's."""

    def __init__(self, address: DeviceAddress) -> None:
        self.host = address.host
        self.has_datagrams = address.transport is TransportType.IB
        self.ports: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve in the block."""
        async with AsyncExitStack() as stack:
            messages = await stack.enter_async_context(
                aiordma.listen(self.host, 0, options=OPTIONS)
            )
            streams = await stack.enter_async_context(aiordma.listen_stream(self.host, 0))
            pings = await stack.enter_async_context(aiordma.listen(self.host, 0))
            self.ports = [each.local_address[1] for each in (messages, streams, pings)]
            self.tasks = [
                asyncio.create_task(messages.serve(obey)),
                asyncio.create_task(streams.serve(echo_stream)),
                asyncio.create_task(ping.serve(pings, lambda _: None)),
            ]
            closables: list[Closable] = [messages, streams, pings]
            if self.has_datagrams:
                endpoint = await stack.enter_async_context(aiordma.open_datagram((self.host, 0)))
                self.tasks += [
                    asyncio.create_task(endpoint.serve()),
                    asyncio.create_task(echo_datagrams(endpoint)),
                ]
                closables.append(endpoint)
            self.ports.append(endpoint.local_address[1] if self.has_datagrams else 0)
            yield
            for each in closables:
                await each.aclose()
            async with asyncio.timeout(TIME_LIMIT):
                await asyncio.gather(*self.tasks)

    async def check(self) -> None:
        """Be a well-behaved peer of each server.

        Raises:
            TimeoutError: a server did not answer in time.
        """
        messages, streams, pings, datagrams = self.ports
        async with asyncio.timeout(TIME_LIMIT):
            for port in (messages, pings):
                async with aiordma.connect(self.host, port) as connection:
                    await connection.send(b"hello")
                    assert await connection.recv() == b"hello"
            async with aiordma.connect_stream(self.host, streams) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
            if datagrams:
                await call_datagrams(self.host, datagrams)
        assert not any(task.done() for task in self.tasks)


def resident_bytes() -> int:
    """Return the size of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_malformed_data_of_every_kind(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    seed, rounds = random.randrange(1 << 32), 0
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(str(context))
    )
    servers = Servers(address)
    async with servers.running():
        begin, size = time.monotonic(), 0
        while time.monotonic() - begin < SECONDS:
            arguments = (seed + rounds, ATTACKS_IN_A_ROUND, address.host, *servers.ports)
            process = start_python(ATTACKER, str(TESTS), *map(str, arguments))
            async with asyncio.timeout(10 * TIME_LIMIT):
                said = await asyncio.to_thread(read_line, process)
            await end(process)
            assert said.startswith("done"), f"the attacker of seed {seed + rounds} ended early"
            await servers.check()
            assert not failures
            rounds += 1
            if rounds <= GROWTH_STARTS_AFTER:
                size = resident_bytes()
        grown = resident_bytes() - size
        seconds = time.monotonic() - begin
    kinds = Counter((record.name, record.levelname, record.msg) for record in caplog.records)
    with capsys.disabled():
        print(
            f"\n{address.device}: seeds {seed} to {seed + rounds - 1}, "
            f"{rounds * ATTACKS_IN_A_ROUND} attacks in {seconds:.0f} s; "
            f"{grown >> 20} MiB grown; records: {dict(kinds)}"
        )
    assert max(kinds.values(), default=0) <= seconds / LOG_SECONDS + 1
    assert grown < MAX_GROWTH
