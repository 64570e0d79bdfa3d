"""The peer reads slowly: nothing is lost or wrong, and little is in flight.

The peer reads only by commands of the test. In between, the sending side has to wait.
"""

from __future__ import annotations

import loops
import pytest
from exchanges import digest, held_connection_to, held_stream_to
from helpers import TIME_LIMIT
from network_peer import Peer
from streaming import pattern

import aiordma
from aiordma.asyncio import open_connection
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.campaign

DEPTH = 8
MESSAGES, BATCH = 120, 20
TOTAL, PIECE = 1_500_000, 10_000
BUFFER = 100_000
# The buffers of the stream on both sides, of the transport, and of the reader with its limit.
ASYNCIO_BUFFERS = 1_000_000
DATAGRAMS = 100


@pytest.mark.transport("IB")
async def test_messages_wait_for_the_reader(peer: Peer, address: DeviceAddress) -> None:
    """The receive queue of the peer is full, then the send queue here, then send() waits."""
    messages = [pattern(900, seed=number) for number in range(MESSAGES)]
    options = {"send_depth": DEPTH, "recv_depth": DEPTH}
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await held_connection_to(peer, address, **options) as connection,
    ):

        async def send() -> None:
            for message in messages:
                await connection.send(message)

        async def is_full() -> bool:
            return bool(await peer.command("unread") == DEPTH)

        sending = loops.create_task(send())
        for read in range(0, MESSAGES, BATCH):
            if read + BATCH < MESSAGES:
                await loops.until(is_full, "the receive queue of the peer to be full")
                assert connection.stats.messages_sent <= read + 2 * DEPTH
                assert connection.stats.send_waits > 0
            expected = digest(b"".join(messages[read : read + BATCH]))
            assert await peer.command("receive", BATCH) == expected
        await sending


async def test_bytes_wait_for_the_reader(peer: Peer, address: DeviceAddress) -> None:
    """The receive buffer of the peer is full, then the send buffer here, then send() waits."""
    data = pattern(TOTAL)
    options = {"send_buffer": BUFFER, "recv_buffer": BUFFER}
    sent = 0
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await held_stream_to(peer, address, **options) as stream,
    ):

        async def send() -> None:
            nonlocal sent
            for begin in range(0, TOTAL, PIECE):
                await stream.send(data[begin : begin + PIECE])
                sent += PIECE

        async def is_full() -> bool:
            return bool(await peer.command("unread") == BUFFER)

        sending = loops.create_task(send())
        for read in range(0, TOTAL, 3 * BUFFER):
            if read + 3 * BUFFER < TOTAL:
                await loops.until(is_full, "the receive buffer of the peer to be full")
                assert sent <= read + 2 * BUFFER
            expected = digest(data[read : read + 3 * BUFFER])
            assert await peer.command("receive", 3 * BUFFER) == expected
        await sending


@pytest.mark.loops("asyncio", "uvloop")
async def test_a_writer_of_asyncio_waits_for_the_reader(peer: Peer, address: DeviceAddress) -> None:
    """drain() waits when the buffer of the transport is above its high water mark."""
    data = pattern(3 * ASYNCIO_BUFFERS)
    port = await peer.command("hold_readers", peer.host(address))
    written = 0
    async with loops.timeout(2 * TIME_LIMIT):
        _, writer = await open_connection(peer.host(address), port)
        await peer.command("until_held")
        _, high = writer.transport.get_write_buffer_limits()

        async def write() -> None:
            nonlocal written
            for begin in range(0, len(data), PIECE):
                writer.write(data[begin : begin + PIECE])
                written += PIECE
                await writer.drain()

        writing = loops.create_task(write())
        for read in range(0, len(data), ASYNCIO_BUFFERS):
            if read + ASYNCIO_BUFFERS < len(data):
                await loops.until(
                    lambda: writer.transport.get_write_buffer_size() > high, "drain() to wait"
                )
                assert written <= read + ASYNCIO_BUFFERS
            expected = digest(data[read : read + ASYNCIO_BUFFERS])
            assert await peer.command("receive", ASYNCIO_BUFFERS) == expected
        await writing
        writer.close()
        await writer.wait_closed()


@pytest.mark.transport("IB")
async def test_datagrams_that_find_no_buffer_are_lost_and_the_others_are_right(
    peer: Peer, address: DeviceAddress
) -> None:
    port = await peer.command("hold_datagrams", peer.host(address), recv_depth=DEPTH)
    datagrams = [number.to_bytes(2) + pattern(900, seed=number) for number in range(DATAGRAMS)]
    async with loops.timeout(2 * TIME_LIMIT), aiordma.open_datagram((address.host, 0)) as endpoint:
        target = await endpoint.resolve(peer.host(address), port)
        for datagram in datagrams:
            await endpoint.send_to(target, datagram)
        last = b"last"
        receiving = loops.create_task(peer.command("receive_datagrams", last.hex()))
        while not receiving.done():
            await endpoint.send_to(target, last)
            await loops.sleep(0.1)  # it can be lost, too
        received = [bytes.fromhex(text) for text in (await receiving)[:-1]]
        assert len({*received}) == len(received)
        assert {*received} <= {*datagrams}
        print(f"{len(received)} of {DATAGRAMS} datagrams found one of {DEPTH} buffers")
