"""Both sides of each kind agree with each other, on connections that are made of queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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

END = None


class Region:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.remote = RemoteBuffer(4096, 7, nbytes)

    async def __aenter__(self) -> Region:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class Message:
    def release(self) -> None: ...


class End:
    """One end: messages in a queue, and what was done to the peer's memory."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.peer: End = self
        self.done: list[str] = []

    async def send(self, data: bytes | Region) -> None:
        self.peer.inbox.put_nowait(bytes(data.nbytes) if isinstance(data, Region) else data)

    async def recv(self) -> bytes:
        data = await self.inbox.get()
        if data is END:
            raise PeerClosed("the peer has disconnected")
        return data

    async def recv_message(self) -> Message:
        await self.recv()
        return Message()

    async def allocate(self, nbytes: int, *_: object) -> Region:
        return Region(nbytes)

    async def write(self, source: Region, remote: RemoteBuffer) -> None:
        assert source.nbytes == remote.length
        self.done.append("write")

    async def read(self, remote: RemoteBuffer, into: Region) -> None:
        assert into.nbytes == remote.length
        self.done.append("read")

    def abort(self) -> None:
        self.peer.inbox.put_nowait(END)

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> End:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> End:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except PeerClosed:
            raise StopAsyncIteration from None


class Network:
    """One listener, and all that connect to it."""

    local_address = ("here", 7)

    def __init__(self) -> None:
        self.requests: asyncio.Queue[End | None] = asyncio.Queue()
        self.clients: list[End] = []

    @asynccontextmanager
    async def listen(self, host: str, port: int, options: object) -> Any:
        yield self

    def connect(self, host: str, port: int, options: object) -> Any:
        near, far = End(), End()
        near.peer, far.peer = far, near
        self.clients.append(near)
        self.requests.put_nowait(far)
        return Opening(near)

    async def accept(self) -> End:
        end = await self.requests.get()
        assert end is not None
        return end

    async def serve(self, handler: Callable[[End], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            while (end := await self.requests.get()) is not None:
                tasks.create_task(_run(handler, end))

    def abort(self) -> None:
        self.requests.put_nowait(END)


async def _run(handler: Callable[[End], Awaitable[None]], end: End) -> None:
    await handler(end)


class Opening:
    def __init__(self, end: End) -> None:
        self._end = end

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self._end

    async def __aenter__(self) -> End:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self._end.aclose()


def run_both(kind: str, work: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[Sample, Network]:
    """Run server and client until both have ended."""

    async def main() -> tuple[Sample, Network]:
        serve, drive = KINDS[kind]
        network = Network()
        monkeypatch.setattr(aiordma, "listen", network.listen)
        monkeypatch.setattr(aiordma, "connect", network.connect)
        ports: list[int] = []
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve("here", ports.append, work))
            driving = tasks.create_task(drive("here", 7, work))
        assert ports == [7]
        return driving.result(), network

    return asyncio.run(main())


def test_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, _ = run_both("messages", Work("latency", count=5, warmup=2), monkeypatch)
    assert sample.percentiles.keys() == {"min", "50", "90", "99", "99.9", "max"}


@pytest.mark.parametrize("warmup", [0, 3])
def test_rate(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, _ = run_both("messages", Work("rate", count=5, warmup=warmup), monkeypatch)
    assert sample.value == pytest.approx(5 / sample.details["seconds"])


@pytest.mark.parametrize("operation", ["send", "write", "read"])
@pytest.mark.parametrize("count", [3, 40])
def test_bandwidth(operation: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("bandwidth", operation, size=1 << 20, count=count, warmup=2)
    sample, network = run_both("messages", work, monkeypatch)
    assert sample.value == pytest.approx(count * 1.048576 / sample.details["seconds"])
    expected = [] if operation == "send" else [operation] * (count + 2)
    assert network.clients[0].done == expected


def test_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("connections", count=10, warmup=3, concurrency=4)
    sample, network = run_both("connections", work, monkeypatch)
    assert sample.value > 0
    assert len(network.clients) == 1 + 3 + 10


def test_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([1 << 20, (1 << 20) + 10 * 2048])
    monkeypatch.setattr(connections, "memory", lambda: next(pages))
    work = Work("idle", idle=10, count=3, warmup=1, concurrency=4)
    sample, network = run_both("idle", work, monkeypatch)
    assert sample.value == 2.0
    assert sample.details["connections"] == len(network.clients) - 1 == 10
    assert sample.details["latency_ratio"] > 0


def test_this_process_has_memory() -> None:
    assert connections.memory() > 1 << 20


def test_the_options_suit_the_work() -> None:
    assert messages.options(Work("rate")).recv_depth == 512
    assert messages.options(Work("latency", size=1)).max_message_size == 64
    large = messages.options(Work("bandwidth", size=1 << 20))
    assert (large.max_message_size, large.recv_depth) == (1 << 20, 128)
    written = messages.options(Work("bandwidth", "write", size=1 << 20, busy_poll=0.5))
    assert (written.max_message_size, written.busy_poll) == (64, 0.5)
