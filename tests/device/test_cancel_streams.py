"""The state after a cancelled await: byte streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import can_be_resized
from streaming import DEFAULT, pattern, receive_exactly, streaming

import aiordma
from aiordma import ByteStream, LocalClosed, PeerClosed, Rejected, StreamOptions
from aiordma.rdmacm import DeviceAddress


async def opened(where: tuple[str, int]) -> ByteStream:
    return await aiordma.connect_stream(*where)


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
        await loops.until(lambda: pair.server._core.is_readable, "the bytes to arrive")
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
        region = await pair.server.allocate(64)
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


@pytest.mark.awaits("ByteStream.__aexit__")
async def test_cancelled_block_aborts_its_stream(address: DeviceAddress) -> None:
    async with streaming(address) as pair:

        async def block() -> None:
            async with pair.client as stream:
                await stream.receive()

        await cancel(block)
        assert pair.client._endpoint.released
        with pytest.raises(PeerClosed):
            await pair.server.receive()


@pytest.mark.awaits("connect_stream", "StreamRequest.reject")
async def test_cancelled_connect_leaves_nothing_and_cancelled_reject_rejects(
    address: DeviceAddress,
) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        where = listener.local_address
        assert await cancelled(lambda: opened(where), begun=False)
        connecting = loops.create_task(opened(where))
        request = await listener.get_request()  # now connect_stream() waits for the reply
        connecting.cancel()
        await loops.wait([connecting])
        assert connecting.cancelled()
        await request.reject()
        connecting = loops.create_task(opened(where))
        request = await listener.get_request()
        await cancelled(request.reject)
        with pytest.raises(Rejected):
            await connecting


@pytest.mark.awaits("listen_stream", "StreamListener.aclose", "StreamListener.__aexit__")
async def test_cancelled_listen_or_aclose_leaves_the_port_free(address: DeviceAddress) -> None:
    listener = await aiordma.listen_stream(address.host, 0)
    port = listener.local_address[1]
    await cancelled(listener.aclose)
    with pytest.raises(LocalClosed):
        await listener.get_request()
    await listener.aclose()
    assert await cancelled(lambda: aiordma.listen_stream(address.host, port), begun=False)
    async with aiordma.listen_stream(address.host, port) as again:
        assert again.local_address[1] == port


@pytest.mark.awaits("StreamListener.get_request", "StreamListener.__anext__")
@pytest.mark.parametrize("get", [lambda listener: listener.get_request(), anext])
async def test_cancelled_get_request_loses_no_request(address: DeviceAddress, get: object) -> None:
    assert callable(get)
    async with aiordma.listen_stream(address.host, 0) as listener:
        await cancel(lambda: get(listener))
        connecting = loops.create_task(opened(listener.local_address))
        await (await get(listener)).reject()
        with pytest.raises(Rejected):
            await connecting


@pytest.mark.awaits("StreamRequest.accept", "StreamListener.accept")
async def test_cancelled_accept_loses_only_the_peer_being_accepted(address: DeviceAddress) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        await cancel(listener.accept)
        lost = loops.create_task(opened(listener.local_address))
        request = await listener.get_request()
        await cancel(request.accept)
        with pytest.raises(LocalClosed):
            await request.accept()
        with pytest.raises((aiordma.ConnectError, PeerClosed)):
            async with await lost as stream:
                await stream.receive()
        other = loops.create_task(opened(listener.local_address))
        async with await listener.accept() as accepted, await other as stream:
            await stream.send(b"the other")
            assert await receive_exactly(accepted, 9) == b"the other"


@pytest.mark.awaits("StreamListener.serve")
async def test_cancelled_serve_closes_the_listener_and_cancels_its_handlers(
    address: DeviceAddress,
) -> None:
    inside = loops.make_event()
    ends: list[BaseException] = []

    async def handler(stream: ByteStream) -> None:
        inside.set()
        try:
            await stream.receive()
        except BaseException as error:
            ends.append(error)
            raise

    listener = await aiordma.listen_stream(address.host, 0)
    serving = loops.create_task(listener.serve(handler))
    async with await opened(listener.local_address) as peer:
        await inside.wait()
        serving.cancel()
        await loops.wait([serving])
        assert serving.cancelled()
        assert [isinstance(end, loops.CancelledError) for end in ends] == [True]
        with pytest.raises(PeerClosed):
            await peer.receive()
