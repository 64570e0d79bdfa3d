"""Messages over a real device: sizes, order, many at once, and limits."""

from __future__ import annotations

import array

import loops
import pytest
from helpers import DEFAULT, connected

import aiordma
from aiordma import ConnectionOptions, LocalClosed
from aiordma.rdmacm import DeviceAddress


async def test_messages_of_every_size_arrive_whole(any_address: DeviceAddress) -> None:
    limit = DEFAULT.max_message_size
    inline = DEFAULT.max_inline
    async with connected(any_address) as pair:
        for size in (0, 1, inline, inline + 1, 1024, 1025, 4096, limit - 1, limit):
            message = bytes(index % 251 for index in range(size))
            await pair.client.send(message)
            assert await pair.server.recv() == message
            await pair.server.send(message)
            assert await pair.client.recv() == message


async def test_a_large_message_arrives_whole(address: DeviceAddress) -> None:
    options = ConnectionOptions(max_message_size=1 << 20, recv_depth=2)
    message = bytes(range(256)) * 4096
    async with connected(address, options, options) as pair:
        await pair.client.send(message)
        assert await pair.server.recv() == message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (memoryview(b"abcdef")[::2], b"ace"),
        (array.array("H", [1, 2, 3]), array.array("H", [1, 2, 3]).tobytes()),
        ([b"one", bytearray(b" "), memoryview(b"two")], b"one two"),
    ],
    ids=["bytearray", "view", "strided", "array", "list"],
)
async def test_any_bytes_like_object_or_list_can_be_sent(
    address: DeviceAddress, data: bytes, expected: bytes
) -> None:
    async with connected(address) as pair:
        await pair.client.send(data)
        assert await pair.server.recv() == expected


async def test_the_buffer_can_be_reused_when_send_returns(address: DeviceAddress) -> None:
    buffer = bytearray(b"a" * 5000)
    async with connected(address) as pair:
        await pair.client.send(buffer)
        buffer[:] = b"b" * 5000
        buffer.extend(b"not exported any more")
        assert await pair.server.recv() == b"a" * 5000


async def test_a_message_that_is_too_large_raises_value_error(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with pytest.raises(ValueError, match="max_message_size is 16384"):
            await pair.client.send(bytes(16385))
        await pair.client.send(b"still here")
        assert await pair.server.recv() == b"still here"


async def test_messages_keep_their_order_both_ways_at_once(address: DeviceAddress) -> None:
    count = 150
    # iWARP has no receiver-not-ready: a receive must be posted for each message in flight.
    options = ConnectionOptions(recv_depth=count if address.transport.name == "IWARP" else 4)

    async def send_all(connection: aiordma.Connection) -> None:
        for number in range(count):
            await connection.send(b"%d" % number * (1 + number % 50))

    async def receive_all(connection: aiordma.Connection) -> None:
        for number in range(count):
            assert await connection.recv() == b"%d" % number * (1 + number % 50)

    async with connected(address, options, options) as pair, loops.TaskGroup() as tasks:
        # On iWARP the connecting side sends first.
        tasks.create_task(send_all(pair.client))
        tasks.create_task(send_all(pair.server))
        tasks.create_task(receive_all(pair.client))
        tasks.create_task(receive_all(pair.server))


@pytest.mark.transport("IB")
async def test_send_on_a_full_queue_waits_and_its_buffer_cannot_be_resized(
    address: DeviceAddress,
) -> None:
    """The peer does not receive. On RoCE its device then delays the sends."""
    options = ConnectionOptions(send_depth=1, recv_depth=1)
    async with connected(address, options, options) as pair:
        buffer = bytearray(options.max_message_size)
        sends = [loops.create_task(pair.client.send(buffer)) for _ in range(4)]
        await loops.until(lambda: sum(send.done() for send in sends) >= 2, "two sends to return")
        await pair.server.send(b"the other way")
        assert await pair.client.recv() == b"the other way"
        assert sorted(send.done() for send in sends) == [False, False, True, True]
        with pytest.raises(BufferError):
            buffer.extend(bytes(300_000))
        for _ in sends:
            assert await pair.server.recv() == buffer
        await loops.gather(*sends)
        buffer.extend(b"free again")


async def test_use_after_close_raises_local_closed(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.client.aclose()
        assert pair.client.closed
        with pytest.raises(LocalClosed):
            await pair.client.send(b"x")
        with pytest.raises(LocalClosed):
            await pair.client.recv()
        with pytest.raises(LocalClosed):
            await anext(pair.client)
        await pair.client.aclose()
        pair.client.abort()
