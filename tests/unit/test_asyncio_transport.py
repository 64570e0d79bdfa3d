"""StreamTransport: resuming, and a transport that is dropped without being closed."""

from __future__ import annotations

import asyncio
import gc

import loops
import pytest
from simulator import Simulation
from simulator.ids import PORT
from streaming import pattern

import aiordma
from aiordma import PeerClosed, StreamOptions
from aiordma.asyncio import create_connection
from aiordma.asyncio.transport import StreamTransport
from aiordma.loop import scheduled_count
from aiordma.streams.stream_core import connect_stream_core

pytestmark = pytest.mark.loops("asyncio")


class Collector(asyncio.Protocol):
    """Stores what it receives."""

    def __init__(self) -> None:
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data


async def test_only_a_paused_transport_has_to_be_resumed(simulation: Simulation) -> None:
    """aiohttp resumes its transport four times for each request and its response."""
    async with aiordma.listen_stream(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        transport, protocol = await create_connection(Collector, simulation.far.host, PORT)
        assert isinstance(transport, StreamTransport)
        receiver = transport.core.receiver
        async with await accepting as server:
            await server.send(b"before")
            await loops.until(lambda: protocol.received == b"before", "the bytes")
            scheduled = scheduled_count()
            transport.resume_reading()
            assert scheduled_count() == scheduled
            transport.pause_reading()
            await server.send(b", after")
            await loops.until(lambda: receiver.has_bytes, "bytes to read")
            assert protocol.received == b"before"
            transport.resume_reading()
            await loops.until(lambda: protocol.received == b"before, after", "all bytes")
            transport.close()
            assert await server.receive() == b""


async def test_bytes_reach_the_protocol_without_a_change_of_the_stream(
    simulation: Simulation,
) -> None:
    """C sets the future of the transport: no Python runs between the completion and it."""
    async with aiordma.listen_stream(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        transport, protocol = await create_connection(Collector, simulation.far.host, PORT)
        assert isinstance(transport, StreamTransport)
        async with await accepting as server:
            await server.send(b"first")
            await loops.until(lambda: protocol.received == b"first", "the first bytes")
            on_change, changes = transport.core.on_change, []

            def note_change() -> None:
                changes.append(len(protocol.received))
                on_change()

            transport.core.on_change = note_change
            for number in range(1, 4):
                await server.send(b"bytes")
                await loops.until(lambda: len(protocol.received) == 5 + 5 * number, "the bytes")  # noqa: B023
            assert changes == []
            await server.send_eof()
            await loops.until(transport.is_closing, "the end")
            assert changes[0] == 20


async def test_all_bytes_reach_a_protocol_that_was_paused(simulation: Simulation) -> None:
    """They are more than one read takes, and nothing arrives after them."""
    options = StreamOptions(recv_buffer=1 << 20, adaptive_poll=False)
    host = simulation.far.host
    async with aiordma.listen_stream(host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        transport, protocol = await create_connection(Collector, host, PORT, options=options)
        assert isinstance(transport, StreamTransport)
        data = pattern(500_000)
        async with await accepting as server:
            transport.pause_reading()
            await server.send(data)
            core = transport.core
            await loops.until(lambda: core.snapshot().bytes_unread == len(data), "the bytes")
            assert not protocol.received
            transport.resume_reading()
            await loops.until(lambda: protocol.received == data, "all bytes")
            transport.close()


async def test_a_dropped_transport_warns_and_is_destroyed(simulation: Simulation) -> None:
    host, loop = simulation.far.host, asyncio.get_running_loop()
    async with aiordma.listen_stream(host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        core = await connect_stream_core(host, PORT, None, StreamOptions())
        ends = [StreamTransport(core, loop, asyncio.Protocol())]
        del core
        async with await accepting as server:
            with pytest.warns(ResourceWarning, match="unclosed transport <StreamTransport"):  # noqa: PT031
                ends.clear()
                gc.collect()
            with pytest.raises(PeerClosed):
                await server.receive()
