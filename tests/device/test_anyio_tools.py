"""anyio's wrappers of streams and listeners over aiordma streams, on every loop."""

from __future__ import annotations

import ssl

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream, BufferedByteStream
from anyio.streams.stapled import MultiListener, StapledObjectStream
from anyio.streams.text import TextStream
from anyio.streams.tls import TLSAttribute, TLSListener, TLSStream
from anyio_pairs import connected, running
from streaming import tls_contexts

import aiordma.anyio
from aiordma.anyio import RdmaAttribute, RdmaConnection
from aiordma.rdmacm import DeviceAddress


async def test_text_stream(address: DeviceAddress) -> None:
    async with connected(address) as (near, far, _):
        here, there = TextStream(near), TextStream(far)
        await here.send("grüße")
        assert await there.receive() == "grüße"
        await far.send(b"halb" + "ß".encode()[:1])
        await far.send("ß".encode()[1:])
        assert await here.receive() == "halb"
        assert await here.receive() == "ß"
        assert here.extra(RdmaAttribute.device_name) == address.device
        await there.aclose()
        with pytest.raises(anyio.EndOfStream):
            await here.receive()


async def test_buffered_byte_receive_stream(address: DeviceAddress) -> None:
    """The boundaries of the messages make no difference."""
    async with connected(address) as (near, far, _):
        buffered = BufferedByteReceiveStream(far)
        for message in (b"some", b"", b"thing\nand a", b" line\nthe rest"):
            await near.send(message)
        assert await buffered.receive_exactly(6) == b"someth"
        assert await buffered.receive_until(b"\n", 100) == b"ing"
        assert await buffered.receive_until(b"\n", 100) == b"and a line"
        assert await buffered.receive(3) == b"the"
        assert buffered.buffer == b" rest"
        await near.aclose()
        with pytest.raises(anyio.IncompleteRead):
            await buffered.receive_exactly(6)
        await buffered.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await far.receive()


async def test_buffered_byte_stream(address: DeviceAddress) -> None:
    async with connected(address) as ends:
        near, far = BufferedByteStream(ends.near), BufferedByteStream(ends.far)
        await near.send(b"question\nmore")
        assert await far.receive_until(b"\n", 100) == b"question"
        await far.send(b"answer")
        assert await near.receive_exactly(6) == b"answer"
        assert await far.receive_exactly(4) == b"more"


async def test_stapled_object_stream(address: DeviceAddress) -> None:
    """One connection sends, another one receives."""
    async with connected(address) as one, connected(address) as two:
        near = StapledObjectStream(one.near, two.near)
        far = StapledObjectStream(two.far, one.far)
        await near.send(b"question")
        assert await far.receive() == b"question"
        await far.send(b"answer")
        await near.send_eof()
        with pytest.raises(anyio.EndOfStream):
            await far.receive()
        assert await near.receive() == b"answer"
        await near.aclose()
        await far.aclose()


async def test_multi_listener(address: DeviceAddress) -> None:
    async def echo(stream: RdmaConnection) -> None:
        await stream.send(await stream.receive())

    listeners = [await aiordma.anyio.listen(address.host, 0) for _ in range(2)]
    addresses = [listener.extra(RdmaAttribute.local_address) for listener in listeners]
    async with MultiListener(listeners) as listener, running(listener.serve, echo):
        for where in addresses:
            async with aiordma.anyio.connect(*where) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"


@pytest.fixture(scope="module")
def contexts() -> Contexts:
    """Return tls_contexts() with which an end of the stream without close_notify is an error."""
    server, client = tls_contexts()
    for context in (server, client):
        context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    return server, client


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


async def test_tls_stream(address: DeviceAddress, contexts: Contexts) -> None:
    server, client = contexts
    message = bytes(range(256)) * 48  # a TLS record with a third of it fits into a message

    async def serve(stream: RdmaConnection) -> None:
        tls = await TLSStream.wrap(stream, server_side=True, ssl_context=server)
        await tls.send(await BufferedByteReceiveStream(tls).receive_exactly(len(message)))
        with pytest.raises(anyio.BrokenResourceError):  # the peer sent no close_notify
            await tls.receive()

    async with connected(address) as (near, far, _), anyio.create_task_group() as tasks:
        tasks.start_soon(serve, far)
        tls = await TLSStream.wrap(near, hostname="rdma.example", ssl_context=client)
        assert tls.extra(TLSAttribute.tls_version).startswith("TLSv1.")
        assert tls.extra(RdmaAttribute.device_name) == address.device
        for _ in range(3):
            await tls.send(message[: len(message) // 3])
        assert await BufferedByteReceiveStream(tls).receive_exactly(len(message)) == message
        with pytest.raises(ValueError, match="max_message_size"):
            await tls.send(bytes(20_000))
        await anyio.aclose_forcefully(tls)


async def test_tls_listener(address: DeviceAddress, contexts: Contexts) -> None:
    server, client = contexts

    async def handler(stream: TLSStream) -> None:
        async with stream:
            await stream.send((await stream.receive()).upper())
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()

    async with (
        aiordma.anyio.listen(address.host, 0) as listener,
        running(TLSListener(listener, server).serve, handler),
    ):
        near = await aiordma.anyio.connect(*listener.extra(RdmaAttribute.local_address))
        async with await TLSStream.wrap(
            near, hostname="rdma.example", ssl_context=client
        ) as stream:
            await stream.send(b"hello")
            assert await stream.receive() == b"HELLO"
