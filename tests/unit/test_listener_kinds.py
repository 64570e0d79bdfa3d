"""Every kind of listener: the limits on its peers, its counts, and peers that fail."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import loops
import pytest
import trio
from simulator import Simulation
from stream_sides import Script, settings

import aiordma
import aiordma.anyio
import aiordma.asyncio
import aiordma.trio
from aiordma import (
    ByteStream,
    Connection,
    ListenerLimits,
    ListenerStats,
    PeerClosed,
    Rejected,
    VerbsError,
)
from aiordma.anyio import RdmaByteStream, RdmaConnection
from aiordma.cm.accepting import BaseListener
from aiordma.memory import buffer_pool
from aiordma.memory.buffer_pool import AllocatedRegion
from aiordma.trio import RdmaStream

PORT = 7471
FAR = "10.0.0.2"
LIMITS = ListenerLimits(max_connections=3, max_handshakes=2, handshake_timeout=3)
WIDE = ListenerLimits()

# On iWARP the accepting side has the connection once it has answered.
pytestmark = pytest.mark.transport("IB")

Stats = Callable[[], ListenerStats]
Serving = Callable[[ListenerLimits], AbstractAsyncContextManager[Stats]]


# --- servers that echo, one of each kind: `async with serve_...(limits) as stats` ---


@asynccontextmanager
async def running(listener: BaseListener[Any, Any], serve: Awaitable[None]) -> AsyncIterator[Stats]:
    """Let a listener of the core serve in the block."""
    task = loops.create_task(serve)
    try:
        yield lambda: listener.stats
    finally:
        listener.abort()
        await task


@asynccontextmanager
async def serve_messages(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(connection: Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with (
        aiordma.listen(FAR, PORT, limits=limits) as listener,
        running(listener, listener.serve(echo)) as stats,
    ):
        yield stats


@asynccontextmanager
async def serve_streams(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(stream: ByteStream) -> None:
        while data := await stream.receive():
            await stream.send(data)

    async with (
        aiordma.listen_stream(FAR, PORT, limits=limits) as listener,
        running(listener, listener.serve(echo)) as stats,
    ):
        yield stats


@asynccontextmanager
async def serve_anyio_messages(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(stream: RdmaConnection) -> None:
        async for message in stream:
            await stream.send(message)

    async with (
        aiordma.anyio.listen(FAR, PORT, limits=limits) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, echo)
        yield lambda: listener.stats
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serve_anyio_streams(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(stream: RdmaByteStream) -> None:
        async for data in stream:
            await stream.send(data)

    async with (
        aiordma.anyio.listen_stream(FAR, PORT, limits=limits) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, echo)
        yield lambda: listener.stats
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serve_asyncio(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await aiordma.asyncio.start_server(echo, FAR, PORT, limits=limits)
    try:
        yield lambda: server.stats
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def serve_trio(limits: ListenerLimits) -> AsyncIterator[Stats]:
    async def echo(stream: RdmaStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    listener = await aiordma.trio.listen_stream(FAR, PORT, limits=limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        yield lambda: listener.stats
        nursery.cancel_scope.cancel()


# --- their peers ---


@asynccontextmanager
async def peer(serving: Serving) -> AsyncIterator[None]:
    """Connect a peer, which gets an answer, and close it at the end of the block."""
    if serving in (serve_messages, serve_anyio_messages):
        async with aiordma.connect(FAR, PORT) as connection:
            await connection.send(b"ping")
            assert await connection.recv() == b"ping"
            yield
    else:
        async with aiordma.connect_stream(FAR, PORT) as stream:
            await stream.send(b"ping")
            assert await stream.receive() == b"ping"
            yield


@asynccontextmanager
async def silent_peer(simulation: Simulation) -> AsyncIterator[Connection]:
    """Connect a peer whose confirmation is lost."""
    simulation.cm.lose_ready = True
    data = Script(settings()).peer.pack()
    async with aiordma.connect(FAR, PORT, private_data=data) as connection:
        await loops.sleep(0.1)  # longer than a message is under way
        simulation.cm.lose_ready = False
        yield connection


# --- limits and counts ---

on_every_loop = pytest.mark.parametrize(
    "serving", [serve_messages, serve_streams, serve_anyio_messages, serve_anyio_streams]
)


@on_every_loop
async def test_a_listener_keeps_its_limits_and_counts(
    simulation: Simulation, serving: Serving
) -> None:
    await check_limits(simulation, serving)


@pytest.mark.loops("asyncio")
async def test_a_server_of_asyncio_keeps_its_limits_and_counts(simulation: Simulation) -> None:
    await check_limits(simulation, serve_asyncio)


@pytest.mark.loops("trio")
async def test_serve_listeners_of_trio_keeps_limits_and_counts(simulation: Simulation) -> None:
    await check_limits(simulation, serve_trio)


async def check_limits(simulation: Simulation, serving: Serving) -> None:
    """Check that each limit holds, and that each number of the stats counts what it says."""
    async with serving(LIMITS) as stats:
        async with silent_peer(simulation) as first, silent_peer(simulation):
            assert (stats().handshakes, stats().connections) == (2, 2)
            async with peer(serving):  # it ends the handshake of the first peer
                with pytest.raises(PeerClosed):
                    await first.recv()
                assert (stats().accepted, stats().dropped, stats().failed) == (1, 1, 0)
                assert (stats().handshakes, stats().connections) == (1, 2)
                await loops.until(lambda: stats().failed == 1, "the other handshake to fail")
                assert (stats().handshakes, stats().connections) == (0, 1)
                async with peer(serving), peer(serving):
                    assert (stats().accepted, stats().connections) == (3, 3)
                    with pytest.raises(Rejected):
                        async with peer(serving):
                            pass
                    assert stats().rejected == 1
        await loops.until(lambda: not stats().connections, "the connections to end")
        async with peer(serving):
            assert stats().accepted == 4
        assert stats().requests_waiting == 0


# --- memory ---


@pytest.mark.parametrize("listen", [aiordma.listen, aiordma.listen_stream])
@pytest.mark.parametrize("step", ["confirmation", "rdma_create_qp"])
async def test_a_handshake_that_fails_frees_its_memory_at_once(
    simulation: Simulation, listen: Callable[..., Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not stay until the garbage collector runs: a flood has thousands of them."""
    made, freed = list[AllocatedRegion](), list[AllocatedRegion]()
    make, free = AllocatedRegion.__init__, AllocatedRegion.free

    def count(region: AllocatedRegion, *arguments: Any) -> None:
        make(region, *arguments)
        made.append(region)

    def count_freed(region: AllocatedRegion) -> None:
        free(region)
        freed.append(region)

    monkeypatch.setattr(buffer_pool, "KEPT_BYTES", 0)
    monkeypatch.setattr(AllocatedRegion, "__init__", count)
    monkeypatch.setattr(AllocatedRegion, "free", count_freed)
    async with listen(FAR, PORT, limits=LIMITS) as listener:
        accepting = await loops.start(listener.accept())
        if step == "confirmation":
            async with silent_peer(simulation):
                await loops.until(lambda: listener.stats.failed, "the handshake to fail")
            await loops.cancel(accepting)
        else:
            simulation.world.calls.fail(step, errno.ENOMEM, after=1)
            with pytest.raises(Rejected):
                await aiordma.connect(FAR, PORT, private_data=Script(settings()).peer.pack())
            with pytest.raises(VerbsError):
                await accepting
        await loops.until(lambda: not listener.stats.connections, "the connection to end")
        assert {id(one) for one in made} == {id(one) for one in freed}
        assert len(made) >= 2


# --- peers that cannot be accepted, for a reason on this side ---


@on_every_loop
async def test_a_peer_that_cannot_be_accepted_ends_no_listener(
    simulation: Simulation, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    await check_failures(simulation, serving, caplog)


@pytest.mark.loops("asyncio")
async def test_a_peer_that_cannot_be_accepted_ends_no_server_of_asyncio(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    await check_failures(simulation, serve_asyncio, caplog)


@pytest.mark.loops("trio")
async def test_a_peer_that_cannot_be_accepted_does_not_end_serve_listeners(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    await check_failures(simulation, serve_trio, caplog)


async def check_failures(
    simulation: Simulation, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a listener goes on, and logs one line, if memory is short or a call fails."""
    async with serving(WIDE):
        for code in (errno.ENOMEM, errno.EINVAL, errno.ENOMEM):
            # The first queue pair is that of the peer.
            simulation.world.calls.fail("rdma_create_qp", code, after=1)
            with pytest.raises(Rejected):
                async with peer(serving):
                    pass
        async with peer(serving):
            pass
    records = [one for one in caplog.records if one.levelno >= logging.WARNING]
    (record,) = records
    assert (record.levelname, record.exc_info) == ("ERROR", None)
    assert "could not be accepted" in record.getMessage()
