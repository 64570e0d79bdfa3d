"""The state after a cancelled await: messages, one-sided operations, memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import SHARED, can_be_resized, connected

from aiordma import AccessFlags, Connection, ConnectionOptions, RegistrationCache
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress

SMALL = ConnectionOptions(send_depth=1, recv_depth=1)
WINDOW = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND


@pytest.mark.awaits("Connection.send")
@pytest.mark.transport("IB")
async def test_send_cancelled_while_it_waits_sends_nothing(address: DeviceAddress) -> None:
    """The data is copied, and the send queue is full. On iWARP it would not fill up."""
    async with connected(address, SMALL, SMALL) as pair:
        await pair.client.send(b"1")
        await pair.client.send(b"2")
        await cancel(lambda: pair.client.send(b"never"))
        assert await cancelled(lambda: pair.client.send(b"never"), begun=False)
        assert await pair.server.recv() == b"1"
        assert await pair.server.recv() == b"2"
        await pair.client.send(b"3")
        assert await pair.server.recv() == b"3"


@pytest.mark.awaits("Connection.send", "Connection.write")
async def test_cancelled_send_or_write_keeps_memory_registered_until_it_completes(
    address: DeviceAddress,
) -> None:
    async with connected(address) as pair:
        far = await pair.server.allocate(64, SHARED)
        buffer = bytearray(b"sent all the same")
        region = await pair.client.register(buffer, SHARED)
        await cancelled(lambda: pair.client.send(region[:]))
        await cancelled(lambda: pair.client.write(region[:4], far.remote))
        region.close()
        assert await pair.server.recv() == b"sent all the same"
        await pair.client.send(b"after the write")
        assert await pair.server.recv() == b"after the write"
        assert bytes(far[:4].view) == b"sent"
        await region.aclose()
        buffer.extend(b"it may be resized again")


@pytest.mark.awaits("Connection.send", "Connection.write", "Connection.read")
async def test_operation_cancelled_before_it_begins_never_happens(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far, near = (
            await pair.server.register(bytearray(b"far."), SHARED),
            await pair.client.allocate(4, SHARED),
        )
        for start in (
            lambda: pair.client.send(near),
            lambda: pair.client.write(near, far.remote),
            lambda: pair.client.read(far.remote, near),
        ):
            assert await cancelled(start, begun=False)
        await pair.client.send(b"the first")
        assert await pair.server.recv() == b"the first"
        assert (bytes(memoryview(far)), bytes(memoryview(near))) == (b"far.", bytes(4))
        assert pair.client.stats.messages_sent == 1


@pytest.mark.awaits("Connection.read")
async def test_message_sent_after_a_cancelled_read_arrives_after_it(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        memory = bytearray(b"r" * 16384)
        far, near = (
            await pair.server.register(memory, SHARED),
            await pair.client.allocate(16384, SHARED),
        )
        await cancelled(lambda: pair.client.read(far.remote, near))
        await pair.client.send(b"your memory is free")
        await pair.server.recv()
        far.close()
        memory[:] = b"x" * 16384
        await near.aclose()  # waits until the read has completed
        await pair.client.send(b"goes on")
        assert await pair.server.recv() == b"goes on"


@pytest.mark.awaits("Connection.fetch_and_add", "Connection.compare_and_swap")
@pytest.mark.transport("IB")
async def test_cancelled_atomic_operation_happens_at_most_once(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        far = await pair.server.register(bytearray(8), AccessFlags(0xF))
        assert await cancelled(lambda: pair.client.fetch_and_add(far.remote, 1), begun=False)
        assert await pair.client.fetch_and_add(far.remote, 0) == 0
        await cancelled(lambda: pair.client.fetch_and_add(far.remote, 1))
        assert await pair.client.fetch_and_add(far.remote, 0) == 1
        await cancelled(lambda: pair.client.compare_and_swap(far.remote, 1, 7))
        assert await pair.client.fetch_and_add(far.remote, 0) == 7


async def recv_into(connection: Connection) -> bytes:
    buffer = bytearray(100)
    try:
        return bytes(buffer[: await connection.recv_into(buffer)])
    except loops.CancelledError:
        assert buffer == bytearray(100)
        raise


async def recv_message(connection: Connection) -> bytes:
    with await connection.recv_message() as message:
        return bytes(message.data)


@pytest.mark.awaits(
    "Connection.recv", "Connection.recv_into", "Connection.recv_message", "Connection.__anext__"
)
@pytest.mark.parametrize("receive", [Connection.recv, recv_into, recv_message, anext])
async def test_cancelled_receive_loses_no_message(
    address: DeviceAddress, receive: Callable[[Connection], Any]
) -> None:
    async with connected(address) as pair:
        await cancel(lambda: receive(pair.server))
        await pair.client.send(b"one")
        await loops.until(lambda: pair.server.stats.messages_unread, "the first message to arrive")
        assert await cancelled(lambda: receive(pair.server), begun=False)
        waiting = loops.create_task(receive(pair.server))
        await pair.client.send(b"two")
        assert await waiting == b"one"
        # The next message goes to the next call.
        await loops.until(lambda: pair.server.stats.messages_unread, "the second message to arrive")
        assert await receive(pair.server) == b"two"


@pytest.mark.awaits("Connection.register", "Connection.allocate", "Connection.register_dmabuf")
async def test_cancelled_registration_leaves_nothing_registered(address: DeviceAddress) -> None:
    """The fixture `no_leaks` counts the memory regions."""
    descriptor = os.open("/dev/null", os.O_RDONLY)
    async with connected(address) as pair:
        buffer = bytearray(100_000)
        await cancel(lambda: pair.client.register(buffer))
        await cancel(lambda: pair.client.allocate(100_000))
        await cancel(lambda: pair.client.register_dmabuf(descriptor, 0, 4096))
        os.close(descriptor)
        await loops.until(lambda: can_be_resized(buffer), "a worker thread to deregister it")


@pytest.mark.awaits("Connection.bind")
@pytest.mark.transport("IB")
async def test_cancelled_bind_leaves_no_window_bound(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        region = await pair.server.allocate(64, WINDOW)
        await cancel(lambda: pair.server.bind(region))
        await region.aclose()  # waits until no window is bound to it


@pytest.mark.awaits("RegistrationCache.register")
async def test_cancelled_cache_registration_is_cached_or_undone(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        with RegistrationCache(pair.client) as cache:
            buffer = bytearray(5000)
            await cancel(lambda: cache.register(buffer))
            assert len(cache) in (0, 1)
            with await cache.register(buffer) as region:
                assert len(cache) == 1
                await pair.client.send(region)
            assert len(await pair.server.recv()) == 5000


@pytest.mark.awaits("MemoryRegion.aclose", "MemoryRegion.__aexit__")
async def test_cancelled_aclose_still_closes_a_region(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        buffer = bytearray(100)
        region = await pair.client.register(buffer)
        await cancelled(region.aclose)
        assert region.closed
        with pytest.raises(ValueError, match="closed"):
            await pair.client.send(region)
        await region.aclose()
        buffer.extend(b"free")


@pytest.mark.awaits("Connection.send")
async def test_cancelled_senders_do_not_block_others(address: DeviceAddress) -> None:
    """On RoCE, the peer holds back the senders: it has one receive. iWARP needs one for each."""
    is_roce = address.transport is TransportType.IB
    near, far = ConnectionOptions(send_depth=2), ConnectionOptions(recv_depth=1 if is_roce else 100)
    async with connected(address, near, far) as pair:
        senders = [loops.create_task(pair.client.send(b"%d" % n)) for n in range(20)]
        if is_roce:
            posted = 3  # one is received, and two are in flight
            await loops.until(lambda: sum(s.done() for s in senders) == posted, "three sends")
        else:
            await loops.settle()
        for sender in senders[::2]:
            sender.cancel()
        received = loops.create_task(receive_numbers(pair.server, end=99))
        await loops.wait(senders)
        sent = [n for n, sender in enumerate(senders) if not sender.cancelled()]
        assert set(range(1, 20, 2)) <= set(sent)
        if is_roce:
            assert len(sent) <= 10 + posted
        await pair.client.send(b"99")
        assert sorted(await received) == sent


async def receive_numbers(connection: Connection, end: int) -> list[int]:
    """Receive numbers up to `end`. Return those before it."""
    numbers = []
    while (number := int(await connection.recv())) != end:
        numbers.append(number)
    return numbers
