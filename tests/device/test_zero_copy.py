"""Messages without a copy: sent from registered memory, and read where the device wrote them."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, cast

import loops
import numpy as np
import pytest
from helpers import DEFAULT, SHARED, connected, is_receiving

from aiordma import BusyError, Connection, ConnectionOptions, LocalClosed, MemoryRegion, PeerClosed
from aiordma.rdmacm import DeviceAddress

if TYPE_CHECKING:
    from typing_extensions import Buffer


def all_posted(address: DeviceAddress, options: ConnectionOptions = DEFAULT) -> int:
    """Return how many receives a connection posts. On iWARP it posts a spare one."""
    return options.recv_depth + (address.transport.name == "IWARP")


async def test_registered_memory_is_sent_without_a_copy(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with await pair.client.register(bytearray(b"registered memory")) as region:
            await pair.client.send(region)
            await pair.client.send(region[11:])
            await pair.client.send([b"more ", region[11:], b" and ", region[:10]])
            await pair.client.send([region[0:4], region[4:8]])
        received = [await pair.server.recv() for _ in range(4)]
        assert received == [
            b"registered memory",
            b"memory",
            b"more memory and registered",
            b"register",
        ]


async def test_a_list_longer_than_max_sge_is_refused(address: DeviceAddress) -> None:
    options = ConnectionOptions(max_sge=2)
    async with connected(address, options) as pair:
        with await pair.client.register(bytearray(100)) as region:
            pieces = [region[0:10], region[20:30], region[40:50]]
            with pytest.raises(ValueError, match="max_sge is 2"):
                await pair.client.send(pieces)
            await pair.client.send(pieces[:2])
            assert len(await pair.server.recv()) == 20
            await pair.client.send([b"any", b"number", b"of", b"copies"])
            assert await pair.server.recv() == b"anynumberofcopies"


async def test_memory_of_another_loop_is_refused(address: DeviceAddress) -> None:
    """Its keys would be invalid here, and their use would end the connection."""

    async def elsewhere() -> None:
        async with connected(address) as other:
            with await other.client.register(bytearray(10)) as region:
                with pytest.raises(ValueError, match="another event loop"):
                    region.acquire(None)
                regions.append(region)
                await loops.until(done.is_set, "the test to end")

    regions: list[MemoryRegion] = []
    done = threading.Event()
    running = loops.create_task(loops.to_thread(loops.runner_of_this_kind(), elsewhere))
    try:
        async with connected(address) as pair:
            await loops.until(lambda: regions, "the other loop to register memory")
            with pytest.raises(ValueError, match="another event loop"):
                await pair.client.send(regions[0])
            await pair.client.send(b"goes on")
            assert await pair.server.recv() == b"goes on"
    finally:
        done.set()
        await running


async def test_a_message_is_read_in_place(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.client.send(b"first")
        await pair.client.send(b"x" * 1000)
        with await pair.server.recv_message() as first:
            assert (bytes(first.data), first.imm, len(first)) == (b"first", None, 5)
            second = await pair.server.recv_message()
            assert np.frombuffer(second.data, np.uint8).sum() == ord("x") * 1000
            assert bytes(first.data) == b"first"
            assert pair.server.stats.messages_held == 2
        assert first.released
        with pytest.raises(ValueError, match="released"):
            bytes(first.data)
        second.release()
        assert pair.server.stats.messages_held == 0
        assert pair.server.stats.receives_posted == all_posted(address)


@pytest.mark.transport("IB")
async def test_immediate_data_is_received_with_its_message(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with pytest.raises(ValueError, match="32 bits"):
            await pair.client.send(b"x", imm=1 << 32)
        await pair.client.send(b"", imm=7)
        assert await pair.server.recv() == b""
        await pair.client.send(b"inline", imm=1)
        await pair.client.send(b"c" * 1000, imm=0xFFFFFFFF)
        with await pair.client.register(bytearray(b"data")) as region:
            await pair.client.send(region, imm=0)
            far = await pair.server.allocate(4, SHARED)
            await pair.client.write(region, far.remote, imm=77)
        received = []
        for _ in range(4):
            with await pair.server.recv_message() as message:
                received.append((bytes(message.data), message.imm))
        assert received == [(b"inline", 1), (b"c" * 1000, 0xFFFFFFFF), (b"data", 0), (b"", 77)]
        assert bytes(memoryview(far)) == b"data"


async def test_a_message_with_views_cannot_be_released(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.client.send(b"some numbers")
        message = await pair.server.recv_message()
        part = message.data[5:]
        with pytest.raises(BufferError, match="still in use"):
            message.release()
        assert bytes(part) == b"numbers"
        array = np.frombuffer(message.data, np.uint8)
        del part
        with pytest.raises(BufferError, match="still in use"):
            message.release()
        del array
        message.release()
        message.release()


async def test_a_dropped_message_releases_its_buffer(address: DeviceAddress) -> None:
    few = ConnectionOptions(recv_depth=8)
    async with connected(address, server=few) as pair:
        for _ in range(few.recv_depth * 2):
            await pair.client.send(b"dropped")
            data = (await pair.server.recv_message()).data
            assert bytes(data) == b"dropped"
            del data
            gc.collect()
            await loops.settle()
        await loops.until(
            lambda: pair.server.stats.receives_posted == all_posted(address, few),
            "all buffers to be posted again",
        )


async def test_a_message_outlives_its_connection(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.client.send(b"here to stay")
        message = await pair.server.recv_message()
        await pair.client.aclose()
        with pytest.raises(PeerClosed):
            await pair.server.recv()
    assert bytes(message.data) == b"here to stay"
    message.release()


@pytest.mark.transport("IB")
async def test_messages_that_are_not_released_delay_the_sender(address: DeviceAddress) -> None:
    """Backpressure: the sender waits, and no message is lost."""
    far = ConnectionOptions(recv_depth=4)
    near = ConnectionOptions(send_depth=4)
    async with connected(address, near, far) as pair:

        async def send_all() -> None:
            for number in range(40):
                await pair.client.send(b"%d" % number)

        sending = loops.create_task(send_all())
        messages = [await pair.server.recv_message() for _ in range(4)]
        most = near.send_depth + far.recv_depth
        await loops.until(
            lambda: pair.client.stats.messages_sent >= most, "the send queue to be full"
        )
        await pair.server.send(b"the other way")
        assert await pair.client.recv() == b"the other way"
        assert pair.client.stats.messages_sent == most
        assert not sending.done()
        assert pair.server.stats.receives_posted == 0
        received = []
        for message in messages:
            received.append(bytes(message.data))
            message.release()
        received += [await pair.server.recv() for _ in range(36)]
        await sending
        assert received == [b"%d" % number for number in range(40)]


async def test_recv_into_fills_the_given_buffer(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.client.send(b"longer than four")
        buffer = bytearray(4)
        with pytest.raises(ValueError, match="16 bytes does not fit into 4"):
            await pair.server.recv_into(buffer)
        numbers = np.zeros(5, np.uint32)
        # numpy declares its arrays to be buffers only from Python 3.12 on: hence the cast.
        assert await pair.server.recv_into(cast("Buffer", numbers)) == 16
        assert numbers.tobytes() == b"longer than four" + bytes(4)
        await pair.client.send(b"to memory")
        with await pair.server.allocate(32, SHARED) as region:
            assert await pair.server.recv_into(region[10:]) == 9
            assert bytes(memoryview(region)[8:21]) == b"\0\0to memory\0\0"
        with pytest.raises(BufferError):
            await pair.server.recv_into(b"read-only")
        with pytest.raises(BufferError):
            await pair.server.recv_into(memoryview(bytearray(10))[::2])


async def recv_message(connection: Connection) -> bytes:
    with await connection.recv_message() as message:
        return bytes(message.data)


async def test_a_second_task_that_receives_raises_busy(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        for wait in (Connection.recv, recv_message):
            waiting = loops.create_task(wait(pair.server))
            await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
            for receive in (pair.server.recv, pair.server.recv_message):
                with pytest.raises(BusyError):
                    await receive()
            with pytest.raises(BusyError):
                await pair.server.recv_into(bytearray(10))
            await pair.client.send(b"for the first")
            assert await waiting == b"for the first"
        waiting = loops.create_task(recv_message(pair.server))
        await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
        pair.server.abort()
        with pytest.raises(LocalClosed):
            await waiting


async def test_stats_count_the_operations_of_a_connection(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far = await pair.server.allocate(100, SHARED)
        near = await pair.client.allocate(100, SHARED)
        await pair.client.send(b"abc")
        await pair.client.send([b"de", near[:3]])
        await pair.client.write(near[:50], far.remote)
        await pair.client.write(b"inline", far.remote)
        await pair.client.read(far.remote[:20], near)
        assert await pair.server.recv() == b"abc"
        stats = pair.client.stats
        assert (stats.messages_sent, stats.bytes_sent) == (2, 8)
        assert (stats.writes, stats.bytes_written) == (2, 56)
        assert (stats.reads, stats.bytes_read, stats.atomics) == (1, 20, 0)
        stats = pair.server.stats
        assert (stats.messages_received, stats.bytes_received) == (2, 8)
        assert (stats.messages_unread, stats.receives_posted) == (1, all_posted(address) - 1)
