"""Messages without a copy: out of registered memory, and where the device put them."""

from __future__ import annotations

import gc
import threading

import loops
import numpy as np
import pytest
from helpers import DEFAULT, TIME_LIMIT, connected

from aiordma import BusyError, ConnectionOptions, LocalClosed, MemoryRegion, PeerClosed
from aiordma.rdmacm import DeviceAddress


def all_posted(address: DeviceAddress, options: ConnectionOptions = DEFAULT) -> int:
    """iWARP gets a spare one."""
    return options.recv_depth + (address.transport.name == "IWARP")


async def test_registered_memory_is_sent_as_it_is(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        with await pair.client.register(bytearray(b"registered memory")) as region:
            await pair.client.send(region)
            await pair.client.send(region[11:])
            await pair.client.send([b"more ", region[11:], b" and ", region[:10]])
            await pair.client.send([region[0:4], region[4:8]])
        got = [await pair.server.recv() for _ in range(4)]
        assert got == [
            b"registered memory",
            b"memory",
            b"more memory and registered",
            b"register",
        ]


async def test_a_list_has_so_many_pieces_and_no_more(address: DeviceAddress) -> None:
    options = ConnectionOptions(max_sge=2)
    async with loops.timeout(TIME_LIMIT), connected(address, options) as pair:
        with await pair.client.register(bytearray(100)) as region:
            pieces = [region[0:10], region[20:30], region[40:50]]
            with pytest.raises(ValueError, match="max_sge is 2"):
                await pair.client.send(pieces)
            await pair.client.send(pieces[:2])
            assert len(await pair.server.recv()) == 20
            await pair.client.send([b"any", b"number", b"of", b"copies"])
            assert await pair.server.recv() == b"anynumberofcopies"


async def test_memory_of_another_loop_is_refused(address: DeviceAddress) -> None:
    """Its keys would mean nothing, and cost the connection."""

    async def elsewhere() -> None:
        async with connected(address) as other, loops.timeout(TIME_LIMIT):
            with await other.client.register(bytearray(10)) as region:
                with pytest.raises(ValueError, match="another event loop"):
                    region.acquire(None)
                regions.append(region)
                await loops.to_thread(ready.set)
                await loops.to_thread(done.wait)

    regions: list[MemoryRegion] = []
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=loops.runner_of_this_kind(), args=(elsewhere,))
    thread.start()
    try:
        async with loops.timeout(TIME_LIMIT), connected(address) as pair:
            await loops.to_thread(ready.wait)
            with pytest.raises(ValueError, match="another event loop"):
                await pair.client.send(regions[0])
            await pair.client.send(b"goes on")
            assert await pair.server.recv() == b"goes on"
    finally:
        done.set()
        await loops.to_thread(thread.join)


async def test_a_message_is_read_where_it_arrived(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
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
async def test_immediate_data_comes_beside_the_message(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        await pair.client.send(b"inline", imm=1)
        await pair.client.send(b"c" * 1000, imm=0xFFFFFFFF)
        with await pair.client.register(bytearray(b"lent")) as region:
            await pair.client.send(region, imm=0)
            far = await pair.server.allocate(4)
            await pair.client.write(region, far.remote, imm=77)
        got = []
        for _ in range(4):
            with await pair.server.recv_message() as message:
                got.append((bytes(message.data), message.imm))
        assert got == [
            (b"inline", 1),
            (b"c" * 1000, 0xFFFFFFFF),
            (b"lent", 0),
            (b"", 77),
        ]
        assert bytes(memoryview(far)) == b"lent"


async def test_views_of_a_message_keep_it(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
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


async def test_a_dropped_message_gives_its_buffer_back(address: DeviceAddress) -> None:
    few = ConnectionOptions(recv_depth=8)
    async with loops.timeout(TIME_LIMIT), connected(address, server=few) as pair:
        for _ in range(few.recv_depth * 2):
            await pair.client.send(b"dropped")
            data = (await pair.server.recv_message()).data
            assert bytes(data) == b"dropped"
            del data
            gc.collect()
            await loops.settle()
        while pair.server.stats.receives_posted < all_posted(address, few):
            await loops.sleep(0.01)


async def test_a_message_outlives_its_connection(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT):
        async with connected(address) as pair:
            await pair.client.send(b"here to stay")
            message = await pair.server.recv_message()
            await pair.client.aclose()
            with pytest.raises(PeerClosed):
                await pair.server.recv()
        assert bytes(message.data) == b"here to stay"
        message.release()


@pytest.mark.transport("IB")
async def test_who_holds_every_message_holds_the_peer_back(address: DeviceAddress) -> None:
    """Backpressure: the sender waits, and nothing is lost."""
    far = ConnectionOptions(recv_depth=4)
    near = ConnectionOptions(send_depth=4)
    async with loops.timeout(TIME_LIMIT), connected(address, near, far) as pair:

        async def send_all() -> None:
            for number in range(40):
                await pair.client.send(b"%d" % number)

        sending = loops.create_task(send_all())
        held = [await pair.server.recv_message() for _ in range(4)]
        await loops.sleep(0.3)
        assert not sending.done()
        assert pair.server.stats.receives_posted == 0
        got = []
        for message in held:
            got.append(bytes(message.data))
            message.release()
        got += [await pair.server.recv() for _ in range(36)]
        await sending
        assert got == [b"%d" % number for number in range(40)]


async def test_into_a_buffer_of_ones_own(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        await pair.client.send(b"longer than four")
        buffer = bytearray(4)
        with pytest.raises(ValueError, match="16 bytes does not fit into 4"):
            await pair.server.recv_into(buffer)
        numbers = np.zeros(5, np.uint32)
        assert await pair.server.recv_into(numbers) == 16
        assert numbers.tobytes() == b"longer than four" + bytes(4)
        await pair.client.send(b"to memory")
        with await pair.server.allocate(32) as region:
            assert await pair.server.recv_into(region[10:]) == 9
            assert bytes(memoryview(region)[8:21]) == b"\0\0to memory\0\0"
        with pytest.raises(BufferError):
            await pair.server.recv_into(b"read-only")
        with pytest.raises(BufferError):
            await pair.server.recv_into(memoryview(bytearray(10))[::2])


async def test_one_task_receives_at_a_time(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        waiting = loops.create_task(pair.server.recv_message())
        await loops.sleep(0.05)
        for receive in (pair.server.recv, pair.server.recv_message):
            with pytest.raises(BusyError):
                await receive()
        with pytest.raises(BusyError):
            await pair.server.recv_into(bytearray(10))
        await pair.client.send(b"for the first")
        (await waiting).release()
        waiting = loops.create_task(pair.server.recv_message())
        await loops.sleep(0.05)
        pair.server.abort()
        with pytest.raises(LocalClosed):
            await waiting


async def test_numbers_of_a_connection(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        far = await pair.server.allocate(100)
        near = await pair.client.allocate(100)
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
