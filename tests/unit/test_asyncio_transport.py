"""StreamTransport: resuming, and a transport that is dropped without being closed."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation
from simulator.ids import PORT
from streaming import pattern

import aiordma
from aiordma import ByteStream, PeerClosed, StreamOptions
from aiordma.asyncio import create_connection, tls
from aiordma.asyncio.transport import StreamTransport
from aiordma.loop import scheduled_count
from aiordma.streams.stream_core import StreamCore, connect_stream_core

pytestmark = pytest.mark.loops("asyncio")

P = TypeVar("P", bound=asyncio.Protocol)
DEFAULT = StreamOptions()


class Collector(asyncio.Protocol):
    """Stores what it receives."""

    def __init__(self) -> None:
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data


class Ending(Collector):
    """Notes the end, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@asynccontextmanager
async def connected(
    simulation: Simulation, protocol: type[P], options: StreamOptions = DEFAULT
) -> AsyncIterator[tuple[StreamTransport, P, ByteStream]]:
    """Connect a transport to a byte stream. Yield the transport, its protocol, and the stream."""
    host = simulation.far.host
    async with aiordma.listen_stream(host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        transport, made = await create_connection(protocol, host, PORT, options=options)
        assert isinstance(transport, StreamTransport)
        async with await accepting as server:
            yield transport, made, server


def refuse_posts(simulation: Simulation, transport: StreamTransport) -> None:
    """Have the device take one more send request of the transport, and refuse the next ones."""
    qp = simulation.cm.id_of(transport.core.endpoint.cm).qp
    assert qp is not None
    qp.pointer.sends.refusal, qp.pointer.sends.accepted = errno.ENOMEM, 1


async def test_only_a_paused_transport_has_to_be_resumed(simulation: Simulation) -> None:
    """aiohttp resumes its transport four times for each request and its response."""
    async with connected(simulation, Collector) as (transport, protocol, server):
        receiver = transport.core.receiver
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
    async with connected(simulation, Collector) as (transport, protocol, server):
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
    async with connected(simulation, Collector, options) as (transport, protocol, server):
        data = pattern(500_000)
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


async def test_a_transport_ends_if_its_closing_is_cancelled(simulation: Simulation) -> None:
    """Before the task that closes has begun: a program cancels all its tasks, and ends."""
    async with connected(simulation, Ending) as (transport, protocol, _):
        transport.close()
        assert transport._closing_task is not None
        transport._closing_task.cancel()
        await protocol.lost.wait()


async def test_a_write_that_the_device_refuses_ends_the_transport(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again from its beginning: a part of it is posted."""
    again = Mock()
    async with connected(simulation, Ending) as (transport, protocol, _):
        refuse_posts(simulation, transport)
        monkeypatch.setattr(StreamCore, "write", again)
        transport.write(bytes(1 << 18))
        assert transport.is_closing()
        again.assert_not_called()
        await protocol.lost.wait()


async def test_bytes_that_arrived_before_a_refused_write_reach_the_protocol(
    simulation: Simulation,
) -> None:
    async with connected(simulation, Ending) as (transport, protocol, server):
        refuse_posts(simulation, transport)
        await server.send(b"last words")
        simulation.world.settle()  # the loop has not read the completion
        transport.write(bytes(1 << 18))
        assert transport.is_closing()
        assert not transport.core.receiver.has_bytes
        await protocol.lost.wait()
        assert protocol.received == b"last words"


async def test_a_transport_that_pauses_after_a_refused_write_ends(simulation: Simulation) -> None:
    """It would read no end any more."""
    async with connected(simulation, Ending) as (transport, protocol, _):
        refuse_posts(simulation, transport)
        transport.write(bytes(1 << 18))
        transport.pause_reading()
        await protocol.lost.wait()


async def test_a_protocol_can_write_while_data_waits_after_close(simulation: Simulation) -> None:
    """TLS does so: it writes the rest when the transport has room."""

    class Resumed(Ending):
        def resume_writing(self) -> None:
            transport.write(b"the rest")

    async with connected(simulation, Resumed) as (transport, protocol, server):
        transport.write(bytes(1 << 20))
        transport.close()
        received = bytearray()
        while data := await server.receive():
            received += data
        assert received == bytes(1 << 20) + b"the rest"
        await protocol.lost.wait()


class Ordered(asyncio.Protocol):
    """Notes the calls in their order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def data_received(self, data: bytes) -> None:
        self.calls.append(data)

    def eof_received(self) -> None:
        self.calls.append("end")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append(exc)


class Buffered(asyncio.BufferedProtocol):
    """Receives into a buffer of three bytes."""

    def __init__(self) -> None:
        self.buffer, self.received = bytearray(3), b""

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self.buffer[:nbytes]


def test_what_arrives_with_the_end_of_a_handshake_is_passed_on() -> None:
    held, ordered, buffered = tls._HoldingProtocol(), Ordered(), Buffered()
    error = ConnectionResetError()
    for data in (b"one", b"and more"):
        held.data_received(data)
    held.pass_on(buffered)
    assert buffered.received == b"oneand more"
    held.eof_received()
    held.connection_lost(error)
    held.pass_on(ordered)
    assert ordered.calls == [b"one", b"and more", "end", error]
