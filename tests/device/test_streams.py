"""Byte streams between two ends of aiordma: order, limits, flow control and closing."""

from __future__ import annotations

import hashlib
import logging

import loops
import pytest
from helpers import SHARED, host_name
from streaming import DEFAULT, is_full, pattern, receive_all, receive_exactly, streaming

import aiordma
from aiordma import (
    AccessFlags,
    BusyError,
    ByteStream,
    LocalClosed,
    PeerClosed,
    ProtocolError,
    Rejected,
    StreamOptions,
)
from aiordma.rdmacm import DeviceAddress

# Nothing here depends on uvloop. test_asyncio_streams.py also runs on uvloop.
pytestmark = pytest.mark.loops("asyncio", "trio")

SMALL = StreamOptions(send_buffer=4096, recv_buffer=4096, send_depth=16, recv_depth=16)


async def echo(stream: ByteStream) -> None:
    async for data in stream:
        await stream.send(data)


async def test_bytes_arrive_in_order(any_address: DeviceAddress) -> None:
    inline = DEFAULT.max_inline
    async with streaming(any_address) as pair:
        for size in (1, inline, inline + 1, 4096, 1 << 16, (1 << 16) + 1, DEFAULT.recv_buffer):
            data = pattern(size, seed=size)
            for source, sink in ((pair.client, pair.server), (pair.server, pair.client)):
                sending = loops.create_task(source.send(data))
                assert await receive_exactly(sink, size) == data
                await sending


@pytest.mark.parametrize("options", [DEFAULT, SMALL], ids=["usual", "small"])
async def test_megabytes_both_ways_at_once_arrive(
    address: DeviceAddress, options: StreamOptions
) -> None:
    size = 2 << 20 if options is DEFAULT else 100_000
    to_server, to_client = pattern(size), pattern(size + 1, seed=1 << 20)

    async def exchange(stream: ByteStream, data: bytes) -> str:
        async def send() -> None:
            for start in range(0, len(data), 100_000):
                await stream.send(data[start : start + 100_000])
            await stream.send_eof()

        sending = loops.create_task(send())
        received = await receive_all(stream)
        await sending
        return hashlib.sha256(received).hexdigest()

    async with streaming(address, options, options) as pair:
        found = await loops.gather(
            exchange(pair.client, to_server), exchange(pair.server, to_client)
        )
    assert found == [hashlib.sha256(data).hexdigest() for data in (to_client, to_server)]


async def test_many_small_writes_are_not_lost(address: DeviceAddress) -> None:
    """There are more writes than credits, receives and entries of the send queue."""
    async with streaming(address, SMALL, SMALL) as pair:

        async def send() -> None:
            for number in range(500):
                await pair.client.send(number.to_bytes(2, "big"))

        sending = loops.create_task(send())
        received = await receive_exactly(pair.server, 1000)
        await sending
    assert received == b"".join(number.to_bytes(2, "big") for number in range(500))


async def test_data_can_be_received_in_parts_and_bad_arguments_lose_none(
    address: DeviceAddress,
) -> None:
    async with streaming(address) as pair:
        await pair.client.send(b"")
        await pair.client.send(b"0123456789")
        assert await pair.server.receive(4) == b"0123"
        buffer = bytearray(4)
        assert await pair.server.receive_into(buffer) == 4
        assert buffer == b"4567"
        with pytest.raises(ValueError, match="not at least 1"):
            await pair.server.receive(0)
        with pytest.raises(ValueError, match="empty"):
            await pair.server.receive_into(bytearray())
        with pytest.raises(BufferError):
            await pair.server.receive_into(b"read-only")
        with pytest.raises(TypeError):
            await pair.client.send("text")  # type: ignore[arg-type]
        assert await pair.server.receive_into(buffer) == 2
        assert buffer == b"8967"


async def test_a_slow_reader_delays_the_writer(address: DeviceAddress) -> None:
    data = pattern(100_000)
    async with streaming(address, SMALL, SMALL) as pair:
        sending = loops.create_task(pair.client.send(data))
        await loops.until(lambda: is_full(pair.server), "the receive buffer to be full")
        await pair.server.send(b"the other way")
        assert await receive_exactly(pair.client, 13) == b"the other way"
        assert not sending.done()
        assert is_full(pair.server)
        assert await receive_exactly(pair.server, len(data)) == data
        await sending


async def test_registered_memory_is_sent_without_a_copy(address: DeviceAddress) -> None:
    data = bytearray(pattern(600_000))
    async with streaming(address) as pair, await pair.client.register(data) as region:
        sending = loops.create_task(pair.client.send(region))
        assert await receive_exactly(pair.server, len(data)) == data
        await sending
        await pair.client.send(region[10:20])
        assert await pair.server.receive() == data[10:20]


async def test_mapped_memory_is_written_to_directly(address: DeviceAddress) -> None:
    options = StreamOptions(mappings=2, send_buffer=4096)
    async with streaming(address, options, options) as pair:
        near, far = pair.client, pair.server
        first, second = await far.allocate(100_000, SHARED), await far.allocate(100, SHARED)
        await far.iomap(first, 0)
        await far.iomap(second[50:], 1 << 40)
        await far.send(b"mapped")
        assert await near.receive() == b"mapped"
        await near.iowrite(pattern(90_000), 10_000)
        await near.iowrite(b"behind", (1 << 40) + 44)
        await near.send(b"written")
        assert await far.receive() == b"written"
        assert bytes(memoryview(first)) == bytes(10_000) + pattern(90_000)
        assert bytes(memoryview(second)) == bytes(94) + b"behind"
        for offset, nbytes in ((99_999, 2), (1 << 39, 1), (-1, 1)):
            with pytest.raises(ValueError, match="not mapped"):
                await near.iowrite(bytes(nbytes), offset)
        assert near.peer_mappings == 2
        with pytest.raises(ValueError, match="takes 2 mappings"):
            await far.iomap(first, 1 << 41)
        with pytest.raises(ValueError, match="REMOTE_WRITE"):
            await near.iomap(await near.allocate(10, AccessFlags.LOCAL_WRITE), 0)
        first.close()


# --- several tasks ---


async def test_a_second_task_that_receives_or_sends_raises_busy(address: DeviceAddress) -> None:
    async with streaming(address, SMALL, SMALL) as pair:
        receiving = loops.create_task(pair.client.receive())
        sending = loops.create_task(pair.client.send(pattern(50_000)))
        await loops.until(lambda: is_full(pair.server), "the receive buffer to be full")
        with pytest.raises(BusyError, match="receiving"):
            await pair.client.receive()
        with pytest.raises(BusyError, match="sending"):
            await pair.client.send(b"x")
        with pytest.raises(BusyError, match="sending"):
            await pair.client.send_eof()
        await pair.server.send(b"y")
        assert await receiving == b"y"
        assert await receive_exactly(pair.server, 50_000) == pattern(50_000)
        await sending


# --- closing ---


async def test_half_close_ends_one_direction(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        await pair.client.send(b"question")
        await pair.client.send_eof()
        await pair.client.send_eof()
        assert await receive_all(pair.server) == b"question"
        assert await pair.server.receive() == b""
        with pytest.raises(LocalClosed, match="sending side"):
            await pair.client.send(b"more")
        await pair.server.send(b"answer")
        assert await pair.client.receive() == b"answer"
        await pair.server.send_eof()
        assert await pair.client.receive() == b""


async def test_data_sent_before_aclose_can_be_received(address: DeviceAddress) -> None:
    data = pattern(100_000)
    async with streaming(address) as pair:
        await pair.client.send(data)
        await pair.client.aclose()
        assert await receive_all(pair.server) == data
        with pytest.raises(PeerClosed):
            await pair.server.send(b"too late")
        with pytest.raises(LocalClosed):
            await pair.client.receive()
        with pytest.raises(LocalClosed):
            await pair.client.send(b"closed")


async def test_abort_by_the_peer_is_no_end_of_file(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        await pair.client.send(b"last words")
        assert await pair.server.receive() == b"last words"
        pair.client.abort()
        with pytest.raises(PeerClosed):
            await pair.server.receive()


async def test_closing_ends_every_wait(address: DeviceAddress) -> None:
    async with streaming(address, SMALL, SMALL) as pair:
        tasks = [
            loops.create_task(pair.client.receive()),
            loops.create_task(pair.client.send(pattern(50_000))),
        ]
        await loops.until(lambda: is_full(pair.server), "the receive buffer to be full")
        await pair.client.aclose()
        ends = await loops.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [LocalClosed, LocalClosed]


async def test_both_ends_can_close_at_the_same_time(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        await loops.gather(pair.client.aclose(), pair.server.aclose())
        assert pair.client.closed
        assert pair.server.closed


# --- connecting ---


async def test_connect_and_listen_by_name(address: DeviceAddress) -> None:
    with host_name(address) as name:
        async with aiordma.listen_stream(name, 0) as listener:
            accepting = loops.create_task(listener.accept())
            async with aiordma.connect_stream(name, listener.local_address[1]) as client:
                assert client.peer_address == listener.local_address
                assert client.device_name == address.device
                await (await accepting).aclose()


async def test_a_peer_without_the_rsocket_protocol_is_rejected(address: DeviceAddress) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        request = loops.create_task(listener.get_request())
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        with pytest.raises(ProtocolError, match="no rsocket"):
            await (await request).accept()
        with pytest.raises(Rejected):
            await connecting


async def test_connect_to_a_listener_without_the_rsocket_protocol_fails(
    address: DeviceAddress,
) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept(b"hello"))
        with pytest.raises(ProtocolError, match="no rsocket"):
            await aiordma.connect_stream(*listener.local_address)
        async with await accepting as connection:
            with pytest.raises(PeerClosed):
                await connection.recv()


async def test_serve_continues_after_a_peer_without_the_rsocket_protocol(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with aiordma.listen_stream(address.host, 0) as listener:
        serving = loops.create_task(listener.serve(echo))
        with pytest.raises(Rejected):
            await aiordma.connect(*listener.local_address)
        async with aiordma.connect_stream(*listener.local_address) as client:
            await client.send(b"still here")
            assert await client.receive() == b"still here"
        await listener.aclose()
        await serving
    assert "no rsocket" in caplog.text


async def test_a_request_can_be_rejected(address: DeviceAddress) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        connecting = loops.create_task(aiordma.connect_stream(*listener.local_address))
        request = await listener.get_request()
        await request.reject()
        with pytest.raises(Rejected):
            await connecting
        with pytest.raises(LocalClosed, match="answered"):
            await request.accept()


@pytest.mark.loops("asyncio")
async def test_busy_polling_streams_echo_data(address: DeviceAddress) -> None:
    async with streaming(address, StreamOptions(busy_poll=0.05)) as pair:
        answering = loops.create_task(echo(pair.server))
        for number in range(20):
            await pair.client.send(b"%d" % number)
            assert await pair.client.receive() == b"%d" % number
        await pair.client.send_eof()
        await answering


@pytest.mark.loops("asyncio")
async def test_a_dropped_stream_warns_and_is_aborted(address: DeviceAddress) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept())
        client: ByteStream | None = await aiordma.connect_stream(*listener.local_address)
        async with await accepting as server:
            del accepting
            with pytest.warns(ResourceWarning, match="unclosed <ByteStream"):
                client = None
            assert client is None
            with pytest.raises(PeerClosed):
                await server.receive()
