"""The reader of aiordma.asyncio: it takes received bytes itself, and keeps their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from simulator import Simulation
from streaming import pattern

import aiordma
from aiordma.asyncio import open_connection, start_server

pytestmark = pytest.mark.loops("asyncio")

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(simulation: Simulation, **options: Any) -> AsyncIterator[tuple[Ends, Ends]]:
    """Connect two ends: a client with the options, and a server. Close both afterwards."""
    accepted: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
    host = simulation.far.host
    server = await start_server(lambda *ends: accepted.set_result(ends), host, 0)
    port = server.sockets[0].getsockname()[1]
    client = await open_connection(host, port, **options)
    peer = await accepted
    yield client, peer
    for _, writer in (client, peer):
        writer.close()
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_every_read_returns_the_bytes_in_order(simulation: Simulation) -> None:
    async with connected(simulation) as ((reader, _), (_, writer)):
        writer.write(b"first line\nsecond")
        assert await reader.readline() == b"first line\n"
        writer.write(b" line\nend;rest")
        assert await reader.read(3) == b"sec"  # the reader has these bytes in its buffer
        assert await reader.readexactly(8) == b"ond line"
        assert await reader.readuntil(b";") == b"\nend;"
        writer.write(b"0123456789")
        assert await reader.readexactly(6) == b"rest01"
        assert await reader.readexactly(4) == b"2345"
        waiting = await loops.start(reader.readexactly(7))
        writer.write(b"abc")
        assert await waiting == b"6789abc"
        assert await reader.read(0) == b""
        writer.write(b"until the end")
        writer.write_eof()
        assert await reader.read() == b"until the end"
        assert (await reader.read(5), reader.at_eof()) == (b"", True)


async def test_each_read_alone_leaves_the_rest_with_the_stream(simulation: Simulation) -> None:
    async with connected(simulation) as ((reader, _), (_, writer)):
        for number in range(20):
            writer.write(pattern(1000, number))
            received = b""
            while len(received) < 1000:
                received += await reader.read(300)
            assert received == pattern(1000, number)


async def test_one_coroutine_reads_at_a_time(simulation: Simulation) -> None:
    async with connected(simulation) as ((reader, _), (_, writer)):
        waiting = await loops.start(reader.readexactly(4))
        for read in (reader.read(1), reader.readexactly(1), reader.readline()):
            with pytest.raises(RuntimeError, match="another coroutine is already waiting"):
                await read
        writer.write(b"four")
        assert await waiting == b"four"


async def test_a_cancelled_read_loses_nothing(simulation: Simulation) -> None:
    async with connected(simulation) as ((reader, _), (_, writer)):
        await loops.cancel(await loops.start(reader.read(10)))
        waiting = await loops.start(reader.readexactly(10))
        writer.write(b"12345")
        await loops.sleep(0.01)
        await loops.cancel(waiting)
        writer.write(b"67890")
        assert await reader.readexactly(10) == b"1234567890"


async def test_the_end_of_the_peer_is_reported_after_its_bytes(simulation: Simulation) -> None:
    async with connected(simulation) as ((reader, _), (_, writer)):
        writer.write(b"last")
        writer.close()
        await loops.sleep(0.01)
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await reader.readexactly(5)
        assert caught.value.partial == b"last"
        assert await reader.read(1) == b""


async def test_more_than_the_limit_of_the_reader_arrives(simulation: Simulation) -> None:
    data = pattern(300_000)
    async with connected(simulation, limit=1000) as ((reader, _), (_, writer)):
        writer.write(data)
        await loops.sleep(0.01)
        assert await reader.readexactly(len(data)) == data
        writer.write(data)
        with pytest.raises(asyncio.LimitOverrunError):
            await reader.readuntil(b"no such separator")
        assert await reader.readexactly(len(data)) == data


async def test_bytes_for_another_protocol_are_not_taken(simulation: Simulation) -> None:
    """After start_tls() of the writer, they are those of TLS."""

    class Records(asyncio.Protocol):
        received = b""

        def data_received(self, data: bytes) -> None:
            self.received += data

    async with connected(simulation) as ((reader, writer), (_, peer)):
        transport: Any = writer.transport
        own, records = transport.get_protocol(), Records()
        waiting = await loops.start(reader.read(100))
        transport.set_protocol(records)
        peer.write(b"record")
        await loops.sleep(0.01)
        assert (records.received, waiting.done()) == (b"record", False)
        await loops.cancel(waiting)
        peer.write(b", another one")
        for read in (reader.read, reader.readexactly):
            waiting = await loops.start(read(3))
            await loops.sleep(0.01)
            assert not waiting.done()
            await loops.cancel(waiting)
        assert records.received == b"record, another one"
        transport.set_protocol(own)


async def test_a_writer_learns_that_the_peer_has_left(simulation: Simulation) -> None:
    """It waits in drain() when the last bytes and the end arrive."""
    host = simulation.far.host
    async with aiordma.listen_stream(host, 0) as listener:
        accepting = loops.create_task(listener.accept())
        reader, writer = await open_connection(host, listener.local_address[1])
        server = await accepting
        reading = await loops.start(reader.read(4))
        writer.write(bytes(1 << 21))
        draining = await loops.start(writer.drain())
        await server.send(b"last")
        await server.aclose()
        with pytest.raises(ConnectionResetError):
            await draining
        assert await reading == b"last"
        assert writer.is_closing()
        writer.write(b"ignored")
        with pytest.raises(ConnectionResetError):
            await writer.drain()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
