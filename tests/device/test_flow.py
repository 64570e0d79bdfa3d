"""Flow control: full queues, slow readers, shared receive buffers, busy polling."""

from __future__ import annotations

import contextlib
import select
from collections import defaultdict
from functools import partial

import blocking
import loops
import pytest
from helpers import (
    SHARED,
    Pair,
    connected,
    echo,
    has_received,
    is_receiving,
    send_one_at_a_time,
    serving,
)

import aiordma
from aiordma import ConnectionOptions, PeerClosed, ReceiveOverrun
from aiordma.rdmacm import DeviceAddress

TASKS = 200
EACH = 5


async def receive_for_ever(connection: aiordma.Connection) -> None:
    while True:
        await connection.recv()


@pytest.mark.parametrize("size", [20, 500])
async def test_two_hundred_tasks_send_on_one_connection(address: DeviceAddress, size: int) -> None:
    """All messages arrive, those of each task in order."""
    # One task receives; on trio it receives one message in each iteration of the loop. On iWARP
    # nothing delays the senders meanwhile.
    options = ConnectionOptions(send_depth=2, recv_depth=64, recv_backlog=TASKS * EACH)
    async with connected(address, options, options) as pair:
        received: dict[int, list[int]] = defaultdict(list)

        async def send(task: int) -> None:
            for number in range(EACH):
                await pair.client.send(b"%d %d".ljust(size) % (task, number))

        async def receive() -> None:
            for _ in range(TASKS * EACH):
                task, number = (await pair.server.recv()).split()
                received[int(task)].append(int(number))

        async with loops.TaskGroup() as tasks:
            tasks.create_task(receive())
            for task in range(TASKS):
                tasks.create_task(send(task))
        assert received == {task: list(range(EACH)) for task in range(TASKS)}
        if size > options.max_inline:  # small messages can get a credit without a wait
            assert pair.client.stats.send_waits > 0


async def test_reads_beyond_the_initiator_depth_wait(address: DeviceAddress) -> None:
    options = ConnectionOptions(initiator_depth=2, responder_resources=2, send_depth=8)
    async with connected(address, options, options) as pair:
        far = await pair.server.register(bytearray(range(200)), SHARED)
        near = await pair.client.allocate(200, SHARED)
        # Reads that wait must not delay other work requests in the send queue.
        reads = [
            loops.create_task(pair.client.read(far.remote[at : at + 1], near[at:]))
            for at in range(200)
        ]
        await loops.sleep(0)
        assert pair.client.stats.sends_posted <= 2
        await pair.client.send(b"in between")
        assert await pair.server.recv() == b"in between"
        await loops.gather(*reads)
        assert bytes(memoryview(near)) == bytes(range(200))
        assert pair.client.stats.reads == 200


async def test_cancelled_reads_that_wait_do_not_block_others(address: DeviceAddress) -> None:
    options = ConnectionOptions(initiator_depth=1, responder_resources=1)
    async with connected(address, options, options) as pair:
        far = await pair.server.register(bytearray(b"x" * 100), SHARED)
        near = await pair.client.allocate(100, SHARED)
        reads = [loops.create_task(pair.client.read(far.remote, near)) for _ in range(10)]
        await loops.settle()
        for read in reads[::2]:
            read.cancel()
        done = await loops.gather(*reads, return_exceptions=True)
        assert [result for result in done[1::2] if result is not None] == []
        await pair.client.read(far.remote, near)


async def test_the_accepting_side_can_send_first(address: DeviceAddress) -> None:
    """iWARP does not allow that at once: aiordma delays the first send."""

    async def send_first(connection: aiordma.Connection) -> None:
        await connection.send(b"welcome")
        thanks.append(await connection.recv())

    thanks: list[bytes] = []
    async with serving(address, send_first) as listener:
        for _ in range(10):
            async with aiordma.connect(*listener.local_address) as connection:
                assert await connection.recv() == b"welcome"
                await connection.send(b"thanks")
                assert [message async for message in connection] == []
    assert thanks == [b"thanks"] * 10


@pytest.mark.parametrize("size", [100, 100_000])
async def test_operations_after_a_cancelled_read_complete(
    address: DeviceAddress, size: int
) -> None:
    """Operations other than reads have a fence, so that they wait for the cancelled read."""
    async with connected(address) as pair:
        far = await pair.server.register(bytearray(b"x" * size), SHARED)
        near = await pair.client.allocate(size, SHARED)
        for _ in range(20):
            read = loops.create_task(pair.client.read(far.remote, near))
            await loops.settle()
            read.cancel()
            await pair.client.read(far.remote[:10], near)
            await pair.client.send(b"inline")
            await pair.client.send(b"c" * 1000)
            await pair.client.write(b"y", far.remote)
            assert await pair.server.recv() == b"inline"
            assert await pair.server.recv() == b"c" * 1000


def send_at_once(connection: aiordma.Connection, count: int) -> None:
    """Post messages without an iteration of the loop. On trio, send() would cause one each."""
    sends = connection._endpoint.data_path.sends
    for _ in range(count):
        assert sends.try_reserve()
        sends.post_inline(b"burst")


def wait_for_event(connection: aiordma.Connection) -> None:
    """Block until an rdma_cm event arrives at the loop of a connection. The loop does not run."""
    channel = connection._endpoint.cm._dispatcher._channel
    with blocking.allowed():
        loops.block_until(
            lambda: select.select([channel.fd], [], [], 0)[0], "an rdma_cm event to arrive"
        )


@pytest.mark.transport("IWARP")
async def test_a_burst_of_recv_depth_messages_is_no_overrun(address: DeviceAddress) -> None:
    """They are sent at once, and then the connection ends, before the loop runs."""
    server = ConnectionOptions(recv_depth=8)
    async with connected(address, server=server) as pair:
        send_at_once(pair.client, 8)
        loops.block(0.2)  # the device works while the loop does not run
        # All are received, however many of them have arrived by now.
        await pair.client.aclose()
        assert [message async for message in pair.server] == [b"burst"] * 8


@pytest.mark.transport("IWARP")
async def test_a_slow_reader_on_iwarp_keeps_its_connection(address: DeviceAddress) -> None:
    """Unread messages beyond recv_depth are copied out of the ring. All can be received."""
    server = ConnectionOptions(recv_depth=16)
    async with connected(address, server=server) as pair:
        for number in range(400):
            await pair.client.send(b"%d" % number)
            await loops.until(partial(has_received, pair.server, number + 1), "the message")
        assert pair.server.stats.messages_unread == 400
        assert pair.server.stats.spilled > 350
        assert [int(await pair.server.recv()) for _ in range(400)] == list(range(400))


@pytest.mark.transport("IWARP")
async def test_a_reader_that_is_too_slow_on_iwarp_raises_receive_overrun(
    address: DeviceAddress,
) -> None:
    server = ConnectionOptions(recv_depth=16, recv_backlog=50)
    async with connected(address, server=server) as pair:
        with pytest.raises(PeerClosed):
            await send_one_at_a_time(pair.client.send, pair.server)
        for _ in range(51):
            assert await pair.server.recv() == b"too fast"
        with pytest.raises(ReceiveOverrun, match=r"50 messages \(recv_backlog"):
            await receive_for_ever(pair.server)


@pytest.mark.transport("IWARP")
async def test_a_loop_that_is_too_slow_on_iwarp_raises_receive_overrun(
    address: DeviceAddress,
) -> None:
    """All receives are consumed before the loop can post new ones."""
    server = ConnectionOptions(recv_depth=4)
    async with connected(address, server=server) as pair:
        with contextlib.suppress(aiordma.VerbsError):  # the last posts can fail
            send_at_once(pair.client, 40)
        wait_for_event(pair.server)  # the loop does not run before it is too late
        for _ in range(5):
            assert await pair.server.recv() == b"burst"
        with pytest.raises(ReceiveOverrun, match=r"\(recv_depth is 4\)"):
            await receive_for_ever(pair.server)


SHARED_RECEIVES = ConnectionOptions(shared_recv_depth=32, max_message_size=1024)
NEAR = ConnectionOptions(max_message_size=1024)


async def test_connections_share_receive_buffers(address: DeviceAddress) -> None:
    async def exchange(number: int, where: tuple[str, int]) -> None:
        async with aiordma.connect(*where, options=NEAR) as connection:
            for count in range(20):
                message = b"%d %d" % (number, count)
                await connection.send(message)
                assert await connection.recv() == message

    async with serving(address, options=SHARED_RECEIVES) as listener, loops.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(exchange(number, listener.local_address))


async def test_a_slow_reader_does_not_delay_other_connections(address: DeviceAddress) -> None:
    options = ConnectionOptions(shared_recv_depth=16, recv_backlog=100)
    async with aiordma.listen(address.host, 0, options=options) as listener:
        pairs = []
        for _ in range(2):
            accepting = loops.create_task(listener.accept())
            near = await aiordma.connect(*listener.local_address)
            pairs.append(Pair(near, await accepting, listener))
        slow, quick = pairs
        for number in range(80):
            await slow.client.send(b"%d" % number)
            await quick.client.send(b"q")
            assert await quick.server.recv() == b"q"
            # All messages are taken: there are never more on the way than shared receives.
            arrived = partial(has_received, slow.server, number + 1)
            await loops.until(arrived, "the message of the slow connection")
        await loops.until(lambda: slow.server.stats.messages_unread == 80, "80 messages to arrive")
        assert [int(await slow.server.recv()) for _ in range(80)] == list(range(80))
        with pytest.raises(PeerClosed):
            await send_one_at_a_time(slow.client.send, slow.server)
        for _ in range(100):
            await slow.server.recv()
        with pytest.raises(ReceiveOverrun):
            await receive_for_ever(slow.server)
        await quick.client.send(b"still here")
        assert await quick.server.recv() == b"still here"
        for pair in pairs:
            await pair.client.aclose()
            await pair.server.aclose()


async def test_shared_buffers_outlive_their_listener(address: DeviceAddress) -> None:
    async with connected(address, NEAR, SHARED_RECEIVES) as pair:
        await pair.listener.aclose()
        await pair.client.send(b"hello")
        message = await pair.server.recv_message()
        await pair.server.aclose()
        assert bytes(message.data) == b"hello"
        message.release()


async def test_shared_recv_depth_is_refused_except_by_listen(address: DeviceAddress) -> None:
    with pytest.raises(ValueError, match="shared_recv_depth is for listen"):
        await aiordma.connect(address.host, 1, options=SHARED_RECEIVES)
    async with aiordma.listen(address.host, 0, options=SHARED_RECEIVES) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address, options=NEAR))
        request = await listener.get_request()
        with pytest.raises(ValueError, match="32 receive buffers of 1024 bytes"):
            await request.accept(options=ConnectionOptions(shared_recv_depth=32))
        accepted = await request.accept()
        async with await connecting, accepted:
            pass


async def test_many_idle_connections_share_few_buffers(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0, options=SHARED_RECEIVES) as listener:
        accepted = []

        async def accept_all() -> None:
            for _ in range(50):
                accepted.append(await listener.accept())

        accepting = loops.create_task(accept_all())
        options = ConnectionOptions(recv_depth=1, max_message_size=1024, send_depth=4)
        near = [await aiordma.connect(*listener.local_address, options=options) for _ in range(50)]
        await accepting
        assert {connection.stats.receives_posted for connection in accepted} == {32}
        for connection in near + accepted:
            connection.abort()
            await loops.sleep(0)  # a hundred at once overload an emulated machine
        for connection in near + accepted:
            await connection.aclose()


POLLING = ConnectionOptions(busy_poll=0.001)


async def test_busy_polling_receives_messages_and_completes_reads(address: DeviceAddress) -> None:
    async with connected(address, POLLING, POLLING) as pair:
        echoing = loops.create_task(echo(pair.server))
        for number in range(100):
            await pair.client.send(b"%d" % number)
            assert await pair.client.recv() == b"%d" % number
        far = await pair.server.register(bytearray(b"polled"), SHARED)
        near = await pair.client.allocate(6, SHARED)
        await pair.client.read(far.remote, near)
        assert bytes(memoryview(near)) == b"polled"
        await pair.client.aclose()
        await echoing


async def test_busy_polling_lets_other_tasks_run(address: DeviceAddress) -> None:
    """Another task runs while one polls for a message that never arrives."""
    polling = ConnectionOptions(busy_poll=10.0)
    async with connected(address, polling, polling) as pair:
        iterations = 0

        async def count() -> None:
            nonlocal iterations
            while True:
                iterations += 1
                await loops.sleep(0)

        counting = loops.create_task(count())
        receiving = loops.create_task(pair.client.recv())
        await loops.until(lambda: is_receiving(pair.client), "the task to poll")
        iterations, begin = 0, loops.now()
        await loops.until(lambda: iterations > 20, "another task to run")
        assert loops.now() - begin < polling.busy_poll / 2, "the task did not poll any more"
        await loops.cancel(receiving, counting)
        await pair.server.send(b"and nothing is lost")
        assert await pair.client.recv() == b"and nothing is lost"
