"""One-sided operations: reads, writes and atomic operations on memory of the peer."""

from __future__ import annotations

import array
import pickle

import loops
import machine
import pytest
from helpers import SHARED, Pair, access_refused, connected

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionOptions,
    LocalClosed,
    MemoryRegion,
    PeerClosed,
    RemoteBuffer,
    WorkRequestError,
)
from aiordma.qp.post_list import PostList
from aiordma.rdmacm import DeviceAddress

SIZE = 64 * 1024


async def both_memories(pair: Pair) -> tuple[MemoryRegion, RemoteBuffer, bytearray]:
    """Return memory of the client, the remote buffer of memory of the server, and that memory."""
    near = await pair.client.allocate(SIZE, SHARED)
    far_bytes = bytearray(SIZE)
    far = await pair.server.register(far_bytes, SHARED)
    await pair.client.send(b"where?")
    await pair.server.recv()
    await pair.server.send(far.remote.pack())
    remote = RemoteBuffer.unpack(await pair.client.recv())
    assert remote == far.remote
    pair.server._kept = far  # type: ignore[attr-defined]
    return near, remote, far_bytes


async def test_memory_is_written_and_read(any_address: DeviceAddress) -> None:
    async with connected(any_address) as pair:
        near, remote, far = await both_memories(pair)
        view = memoryview(near)
        view[:] = bytes(range(256)) * (SIZE // 256)
        await pair.client.write(near, remote)
        assert far == bytes(range(256)) * (SIZE // 256)
        far[:5] = b"hello"
        await pair.client.read(remote[:5], near[100:200])
        assert bytes(view[100:105]) == b"hello"
        await pair.client.write(b"copied", remote[10:])
        assert far[10:16] == b"copied"
        view.release()


@pytest.mark.loops("asyncio")
async def test_small_reads_may_cross_a_page_of_the_peer(any_address: DeviceAddress) -> None:
    """Soft-iWARP answers such a read with wrong bytes if it is posted in one piece."""
    async with connected(any_address) as pair:
        near = await pair.client.allocate(64, SHARED)
        far = await pair.server.allocate(2 * 4096, SHARED)
        view = memoryview(far)
        view[:] = bytes(number % 251 for number in range(len(view)))
        for nbytes in (2, 8, 32, 33):
            for start in (4096 - nbytes, 4096 - 1, 4096 - nbytes // 2):
                wanted = view[start : start + nbytes]
                for into in (near[:nbytes], [near[:1], near[1:nbytes]]):
                    await pair.client.read(far.remote[start : start + nbytes], into)
                    assert memoryview(near)[:nbytes] == wanted, (start, nbytes)
        view.release()


@pytest.mark.transport("IB")
async def test_a_write_with_immediate_data_is_received_as_an_empty_message(
    address: DeviceAddress,
) -> None:
    async with connected(address) as pair:
        near, remote, far = await both_memories(pair)
        memoryview(near)[:5] = b"hello"
        await pair.client.write(near[:5], remote, imm=7)
        assert await pair.server.recv() == b""
        assert far[:5] == b"hello"


@pytest.mark.transport("IWARP")
async def test_operations_that_iwarp_lacks_are_refused(address: DeviceAddress) -> None:
    remote = RemoteBuffer(0, 0, 8)
    async with connected(address) as pair:
        with pytest.raises(ValueError, match="iWARP carries no immediate data"):
            await pair.client.send(b"x", imm=7)
        with pytest.raises(ValueError, match="no immediate data"):
            await pair.client.write(b"x", remote, imm=7)
        with pytest.raises(ValueError, match="no atomic operations"):
            await pair.client.fetch_and_add(remote, 1)
        region = await pair.client.allocate(100, AccessFlags.LOCAL_WRITE)
        with pytest.raises(ValueError, match="no memory windows"):
            await pair.client.bind(region)
        await pair.client.send(b"still here")
        assert await pair.server.recv() == b"still here"


async def test_use_of_a_closed_region_is_refused(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        numbers = array.array("d", range(1000))
        with await pair.client.register(numbers) as region:
            assert len(region) == 8000
            with pytest.raises(BufferError):
                numbers.append(1)
        assert region.closed
        with pytest.raises(ValueError, match="closed"):
            await pair.client.write(region, RemoteBuffer(0, 0, 8000))
        with pytest.raises(BufferError):
            memoryview(region)


async def read_repeatedly(
    connection: Connection, remote: RemoteBuffer, region: MemoryRegion
) -> None:
    """Read until the connection ends."""
    while True:
        await connection.read(remote, region)


async def test_memory_of_a_read_is_released_if_the_peer_ends(address: DeviceAddress) -> None:
    """siw flushes no read that is under way. The connection need not be closed before."""
    async with connected(address) as pair:
        near, remote, _ = await both_memories(pair)
        pair.server.abort()
        with pytest.raises((WorkRequestError, PeerClosed)):
            await read_repeatedly(pair.client, remote, near)
        await near.aclose()


async def test_a_wrong_key_ends_only_its_connection(address: DeviceAddress) -> None:
    """The peer's device refuses the access."""
    async with connected(address) as other, connected(address) as pair:
        near, remote, _ = await both_memories(pair)
        wrong = RemoteBuffer(remote.addr, remote.rkey ^ 0xFF00, 8)
        with access_refused():
            await pair.client.read(wrong, near)
        assert bytes(memoryview(near)) == bytes(SIZE)
        await other.client.send(b"still here")
        assert await other.server.recv() == b"still here"


async def test_a_read_only_region_is_not_written(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far = await pair.server.register(b"read only", AccessFlags.REMOTE_READ)
        near = await pair.client.allocate(16, SHARED)
        await pair.client.read(far.remote, near)
        assert bytes(memoryview(near)[:9]) == b"read only"
        with pytest.raises(ValueError, match="read-only"):
            await pair.server.register(b"read only")
        if address.transport.name == "IB":
            with access_refused():
                await pair.client.write(b"no", far.remote)
        else:  # the write completes before iWARP terminates the connection
            await pair.client.write(b"no", far.remote)
            with pytest.raises(PeerClosed):
                await pair.client.recv()
        assert bytes(memoryview(far)) == b"read only"


@pytest.mark.transport("IB")
async def test_atomic_operations_change_remote_memory(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        counter = array.array("Q", [40, 0])
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_ATOMIC
        far = await pair.server.register(counter, access)
        assert await pair.client.fetch_and_add(far.remote, 2) == 40
        assert await pair.client.fetch_and_add(far.remote, -1) == 42
        assert await pair.client.compare_and_swap(far.remote[8:], 0, 7) == 0
        assert await pair.client.compare_and_swap(far.remote[8:], 0, 9) == 7
        assert list(counter) == [41, 7]
        with pytest.raises(ValueError, match="multiple of 8"):
            await pair.client.fetch_and_add(far.remote[4:], 1)
        tasks = [pair.client.fetch_and_add(far.remote, 1) for _ in range(100)]
        assert sorted(await loops.gather(*tasks)) == list(range(41, 141))


async def test_many_tasks_write_read_and_send_at_once(
    address: DeviceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that one event wakes post their operations together. Each gets its own bytes."""
    tasks, rounds, size = 12, 25, 512
    chains: list[int] = []
    flush = PostList.flush

    def count(post_list: PostList) -> None:
        chains.append(post_list._core.unposted)
        flush(post_list)

    monkeypatch.setattr(PostList, "flush", count)

    async def work(number: int) -> None:
        mine = slice(number * size, (number + 1) * size)
        memory = memoryview(near)
        for round_number in range(rounds):
            memory[mine] = bytes([round_number, number]) * (size // 2)
            await pair.client.write(near[mine], remote[mine])
            memory[mine] = bytes(size)
            await pair.client.read(remote[mine], near[mine])
            assert memory[mine] == bytes([round_number, number]) * (size // 2)
            if round_number % 5 == 0:
                await pair.client.send(bytes([number, round_number]))
        memory.release()

    async def receive() -> None:
        """The messages of one task keep their order."""
        received = [await pair.server.recv() for _ in range(tasks * rounds // 5)]
        for number in range(tasks):
            rounds_received = [message[1] for message in received if message[0] == number]
            assert rounds_received == list(range(0, rounds, 5))

    async with connected(address) as pair:
        near, remote, far = await both_memories(pair)
        await loops.gather(receive(), *map(work, range(tasks)))
        for number in range(tasks):
            assert far[number * size : (number + 1) * size] == bytes([rounds - 1, number]) * 256
        assert pair.client.stats.reads == pair.client.stats.writes == tasks * rounds
        assert pair.client.stats.sends_posted == 0
    if machine.simulated is not None and not loops.on_trio():  # trio wakes each task on its own
        assert max(chains) > 1  # a real device can report each completion alone


async def test_a_read_with_initiator_depth_0_is_refused(address: DeviceAddress) -> None:
    none = ConnectionOptions(initiator_depth=0)
    async with connected(address, none) as pair:
        near = await pair.client.allocate(8, SHARED)
        with pytest.raises(ValueError, match="initiator_depth 0"):
            await pair.client.read(RemoteBuffer(0, 0, 8), near)


async def test_cancelled_operations_keep_their_memory_registered(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        _, remote, _ = await both_memories(pair)
        for number in range(50):
            region = await pair.client.register(bytearray(SIZE))
            reading = loops.create_task(pair.client.read(remote, region))
            for _ in range(number % 5):
                await loops.sleep(0)
            reading.cancel()
            region.close()
            await loops.gather(reading, return_exceptions=True)
        await pair.client.send(b"alive")
        assert await pair.server.recv() == b"alive"


async def test_abort_ends_reads(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        near, remote, _ = await both_memories(pair)
        tasks = [loops.create_task(pair.client.read(remote, near)) for _ in range(100)]
        await loops.sleep(0)  # not settle(): the reads might have completed by then
        pair.client.abort()
        results = await loops.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {LocalClosed, type(None)}
        assert LocalClosed in {type(result) for result in results}


async def test_a_remote_buffer_can_be_packed_and_pickled() -> None:
    remote = RemoteBuffer(1 << 40, 7, 100)
    assert RemoteBuffer.unpack(remote.pack()) == pickle.loads(pickle.dumps(remote)) == remote
    assert remote[10:20] == RemoteBuffer((1 << 40) + 10, 7, 10)
    assert len(remote[90:200]) == 10
    with pytest.raises(ValueError, match="16 bytes"):
        RemoteBuffer.unpack(b"short")
