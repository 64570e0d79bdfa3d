"""The state after a cancelled await: byte streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import SHARED, can_be_resized
from streaming import DEFAULT, pattern, receive_exactly, streaming

from aiordma import ByteStream, LocalClosed, StreamOptions
from aiordma.rdmacm import DeviceAddress


async def receive_into(stream: ByteStream) -> bytes:
    buffer = bytearray(100)
    try:
        return bytes(buffer[: await stream.receive_into(buffer)])
    except loops.CancelledError:
        assert buffer == bytearray(100)
        raise


@pytest.mark.awaits("ByteStream.receive", "ByteStream.receive_into", "ByteStream.__anext__")
@pytest.mark.parametrize("receive", [ByteStream.receive, receive_into, anext])
async def test_cancelled_receive_loses_no_byte(
    address: DeviceAddress, receive: Callable[[ByteStream], Awaitable[bytes]]
) -> None:
    async with streaming(address) as pair:
        await cancel(lambda: receive(pair.server))
        await pair.client.send(b"kept")
        await loops.until(pair.server._core.receiver.is_readable, "the bytes to arrive")
        assert await cancelled(lambda: receive(pair.server), begun=False)
        assert await receive(pair.server) == b"kept"


@pytest.mark.awaits("ByteStream.send")
async def test_cancelled_send_sends_a_part_of_its_data(address: DeviceAddress) -> None:
    data = pattern(4 * DEFAULT.recv_buffer)
    async with streaming(address) as pair:
        assert await cancelled(lambda: pair.client.send(data), begun=False)
        await cancel(lambda: pair.client.send(data))
        await pair.client.send_eof()
        received = b"".join([part async for part in pair.server])
        assert 0 < len(received) < len(data)
        assert data.startswith(received)


@pytest.mark.awaits("ByteStream.send")
async def test_cancelled_send_keeps_memory_registered_until_it_completes(
    address: DeviceAddress,
) -> None:
    data = pattern(4 * DEFAULT.recv_buffer)
    buffer = bytearray(data)
    async with streaming(address) as pair:
        region = await pair.client.register(buffer)
        await cancel(lambda: pair.client.send(region))
        region.close()
        await pair.client.send_eof()
        received = b"".join([part async for part in pair.server])
        assert data.startswith(received)
        await region.aclose()
        buffer.extend(b"it may be resized again")


@pytest.mark.awaits("ByteStream.send_eof", "ByteStream.wait_sendable")
async def test_cancelled_send_eof_can_be_repeated(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        assert await cancelled(pair.client.wait_sendable, begun=False)
        assert await cancelled(pair.client.send_eof, begun=False)
        await pair.client.send(b"goes on")
        assert await pair.server.receive() == b"goes on"
        await cancelled(pair.client.send_eof)
        await pair.client.send_eof()
        assert await pair.server.receive() == b""


@pytest.mark.awaits("ByteStream.iomap", "ByteStream.iowrite")
async def test_iomap_or_iowrite_cancelled_before_it_begins_does_nothing(
    address: DeviceAddress,
) -> None:
    options = StreamOptions(mappings=1)
    async with streaming(address, options, options) as pair:
        region = await pair.server.allocate(64, SHARED)
        assert await cancelled(lambda: pair.server.iomap(region, 0), begun=False)
        await pair.server.iomap(region, 0)
        await pair.server.send(b"mapped")
        assert await receive_exactly(pair.client, 6) == b"mapped"
        assert await cancelled(lambda: pair.client.iowrite(b"x", 0), begun=False)
        await pair.client.send(b"nothing")
        assert await receive_exactly(pair.server, 7) == b"nothing"
        assert bytes(memoryview(region)) == bytes(64)


@pytest.mark.awaits("ByteStream.register", "ByteStream.register_dmabuf", "ByteStream.allocate")
async def test_cancelled_registration_leaves_nothing_registered(address: DeviceAddress) -> None:
    """Connections share the code. Their test, in test_cancel_data.py, has all three calls."""
    buffer = bytearray(1 << 20)
    async with streaming(address) as pair:
        await cancel(lambda: pair.client.register(buffer))
        await loops.until(lambda: can_be_resized(buffer), "a worker thread to deregister it")
        await cancel(lambda: pair.client.allocate(4096))


@pytest.mark.awaits("ByteStream.aclose")
async def test_cancelled_aclose_aborts_the_stream(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        await cancelled(pair.client.aclose)
        assert pair.client._endpoint.released
        with pytest.raises(LocalClosed):
            await pair.client.send(b"x")
        await pair.server.aclose()
