"""Server and client of each kind in workers/, on fake connections that are made of queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import PeerClosed
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers import connections, messages
from aiordma.bench.workers.__main__ import KINDS
from aiordma.memory import RemoteBuffer

END = None  # in a queue: the peer has disconnected, or the listener is closed


class FakeRegion:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.remote = RemoteBuffer(4096, 7, nbytes)

    async def __aenter__(self) -> FakeRegion:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class FakeMessage:
    def release(self) -> None: ...


class FakeConnection:
    """One end of a connection: a queue of messages, and the names of the operations done."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.peer: FakeConnection = self
        self.done: list[str] = []

    async def send(self, data: bytes | FakeRegion) -> None:
        self.peer.inbox.put_nowait(bytes(data.nbytes) if isinstance(data, FakeRegion) else data)

    async def recv(self) -> bytes:
        data = await self.inbox.get()
        if data is END:
            raise PeerClosed("the peer has disconnected")
        return data

    async def recv_message(self) -> FakeMessage:
        await self.recv()
        return FakeMessage()

    async def allocate(self, nbytes: int, *_: object) -> FakeRegion:
        return FakeRegion(nbytes)

    async def write(self, source: FakeRegion, remote: RemoteBuffer) -> None:
        assert source.nbytes == remote.length
        self.done.append("write")

    async def read(self, remote: RemoteBuffer, into: FakeRegion) -> None:
        assert into.nbytes == remote.length
        self.done.append("read")

    def abort(self) -> None:
        self.peer.inbox.put_nowait(END)

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> FakeConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> FakeConnection:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except PeerClosed:
            raise StopAsyncIteration from None


class Network:
    """One listener, and the connections of its clients."""

    local_address = ("host", 7)

    def __init__(self) -> None:
        self.requests: asyncio.Queue[FakeConnection | None] = asyncio.Queue()
        self.clients: list[FakeConnection] = []

    @asynccontextmanager
    async def listen(self, host: str, port: int, options: object) -> AsyncIterator[Network]:
        yield self

    def connect(self, host: str, port: int, options: object) -> Connecting:
        client, server = FakeConnection(), FakeConnection()
        client.peer, server.peer = server, client
        self.clients.append(client)
        self.requests.put_nowait(server)
        return Connecting(client)

    async def accept(self) -> FakeConnection:
        connection = await self.requests.get()
        assert connection is not None
        return connection

    async def serve(self, handler: Callable[[FakeConnection], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            while (connection := await self.requests.get()) is not None:
                tasks.create_task(_run(handler, connection))

    def abort(self) -> None:
        self.requests.put_nowait(END)


async def _run(
    handler: Callable[[FakeConnection], Awaitable[None]], connection: FakeConnection
) -> None:
    await handler(connection)


class Connecting:
    def __init__(self, connection: FakeConnection) -> None:
        self._connection = connection

    def __await__(self) -> Generator[Any, None, FakeConnection]:
        yield from asyncio.sleep(0).__await__()
        return self._connection

    async def __aenter__(self) -> FakeConnection:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()


def run_both(kind: str, work: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[Sample, Network]:
    """Run server and client until both have ended; return the sample and the network."""

    async def main() -> tuple[Sample, Network]:
        serve, measure = KINDS[kind]
        network = Network()
        monkeypatch.setattr(aiordma, "listen", network.listen)
        monkeypatch.setattr(aiordma, "connect", network.connect)
        ports: list[int] = []
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve("host", ports.append, work))
            measuring = tasks.create_task(measure("host", 7, work))
        assert ports == [7]
        return measuring.result(), network

    return asyncio.run(main())


def test_latency_sample_has_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, _ = run_both("messages", Work("latency", count=5, warmup=2), monkeypatch)
    assert sample.percentiles.keys() == {"min", "50", "90", "99", "99.9", "max"}


@pytest.mark.parametrize("warmup", [0, 3])
def test_rate_is_messages_per_second(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, _ = run_both("messages", Work("rate", count=5, warmup=warmup), monkeypatch)
    assert sample.value == pytest.approx(5 / sample.details["seconds"])


@pytest.mark.parametrize("operation", ["send", "write", "read"])
@pytest.mark.parametrize("count", [3, 40])
def test_bandwidth_is_megabytes_per_second(
    operation: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work("bandwidth", operation, size=1 << 20, count=count, warmup=2)
    sample, network = run_both("messages", work, monkeypatch)
    assert sample.value == pytest.approx(count * 1.048576 / sample.details["seconds"])
    expected = [] if operation == "send" else [operation] * (count + 2)
    assert network.clients[0].done == expected


def test_connections_are_made_for_the_warmup_and_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("connections", count=10, warmup=3, concurrency=4)
    sample, network = run_both("connections", work, monkeypatch)
    assert sample.value > 0
    assert len(network.clients) == 1 + 3 + 10


def test_idle_memory_is_the_difference_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([1 << 20, (1 << 20) + 10 * 2048])
    monkeypatch.setattr(connections, "memory", lambda: next(pages))
    work = Work("idle", idle=10, count=3, warmup=1, concurrency=4)
    sample, network = run_both("idle", work, monkeypatch)
    assert sample.value == 2.0
    assert sample.details["connections"] == len(network.clients) - 1 == 10
    assert sample.details["latency_ratio"] > 0


def test_memory_of_this_process_is_more_than_a_mebibyte() -> None:
    assert connections.memory() > 1 << 20


def test_options_depend_on_the_work() -> None:
    assert messages.options(Work("rate")).recv_depth == 512
    assert messages.options(Work("latency", size=1)).max_message_size == 64
    large = messages.options(Work("bandwidth", size=1 << 20))
    assert (large.max_message_size, large.recv_depth) == (1 << 20, 128)
    written = messages.options(Work("bandwidth", "write", size=1 << 20, busy_poll=0.5))
    assert (written.max_message_size, written.busy_poll) == (64, 0.5)
