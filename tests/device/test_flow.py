"""Who waits for whom: full queues, slow readers, shared receive buffers, polling."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict

import loops
import pytest
from helpers import TIME_LIMIT, Pair, connected, send_one_at_a_time

import aiordma
from aiordma import ConnectionOptions, PeerClosed, ReceiveOverrun
from aiordma.rdmacm import DeviceAddress

TASKS = 200
EACH = 5


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def receive_for_ever(connection: aiordma.Connection) -> None:
    while True:
        await connection.recv()


@pytest.mark.parametrize("size", [20, 500])
async def test_two_hundred_tasks_send_on_one_connection(address: DeviceAddress, size: int) -> None:
    """All get through, those of each task in their order."""
    # One task takes them, a message a turn on trio; nothing holds the others back on iWARP.
    options = ConnectionOptions(send_depth=8, recv_depth=64, recv_backlog=TASKS * EACH)
    async with loops.timeout(3 * TIME_LIMIT), connected(address, options, options) as pair:
        got: dict[int, list[int]] = defaultdict(list)

        async def send(task: int) -> None:
            for number in range(EACH):
                await pair.client.send(b"%d %d".ljust(size) % (task, number))

        async def receive() -> None:
            for _ in range(TASKS * EACH):
                task, number = (await pair.server.recv()).split()
                got[int(task)].append(int(number))

        async with loops.TaskGroup() as tasks:
            tasks.create_task(receive())
            for task in range(TASKS):
                tasks.create_task(send(task))
        assert got == {task: list(range(EACH)) for task in range(TASKS)}
        if size > options.max_inline:  # short ones may get a place without waiting on the loop
            assert pair.client.stats.send_waits > 0


async def test_more_reads_than_negotiated_wait_their_turn(address: DeviceAddress) -> None:
    options = ConnectionOptions(initiator_depth=2, responder_resources=2)
    async with loops.timeout(TIME_LIMIT), connected(address, options, options) as pair:
        far = await pair.server.register(bytearray(range(200)))
        near = await pair.client.allocate(200)
        # The others must not be held up in the send queue by reads that wait.
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


async def test_a_read_is_given_up_while_it_waits(address: DeviceAddress) -> None:
    options = ConnectionOptions(initiator_depth=1, responder_resources=1)
    async with loops.timeout(TIME_LIMIT), connected(address, options, options) as pair:
        far = await pair.server.register(bytearray(b"x" * 100))
        near = await pair.client.allocate(100)
        reads = [loops.create_task(pair.client.read(far.remote, near)) for _ in range(10)]
        await loops.settle()
        for read in reads[::2]:
            read.cancel()
        done = await loops.gather(*reads, return_exceptions=True)
        assert [result for result in done[1::2] if result is not None] == []
        await pair.client.read(far.remote, near)


async def test_the_accepting_side_may_greet(address: DeviceAddress) -> None:
    """Which iWARP does not allow at once."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        aiordma.listen(address.host, 0) as listener,
        loops.TaskGroup() as tasks,
    ):

        async def greet(connection: aiordma.Connection) -> None:
            await connection.send(b"welcome")
            assert await connection.recv() == b"thanks"

        serving = tasks.create_task(listener.serve(greet))
        for _ in range(10):
            async with aiordma.connect(*listener.local_address) as connection:
                assert await connection.recv() == b"welcome"
                await connection.send(b"thanks")
                assert [message async for message in connection] == []
        await listener.aclose()
        await serving


@pytest.mark.parametrize("size", [100, 100_000])
async def test_what_follows_a_read_that_was_given_up(address: DeviceAddress, size: int) -> None:
    """Others wait for its end, by a fence, and reads need none."""
    async with loops.timeout(TIME_LIMIT), connected(address) as pair:
        far = await pair.server.register(bytearray(b"x" * size))
        near = await pair.client.allocate(size)
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
    """Post them without a turn of the loop, which trio would have between any two."""
    sends = connection._endpoint.data_path.sends
    for _ in range(count):
        assert sends.try_reserve()
        sends.post_inline(b"burst")


@pytest.mark.transport("IWARP")
async def test_as_many_messages_as_agreed_are_no_overrun(address: DeviceAddress) -> None:
    """Sent at once, and then the end: the loop sees none of it before."""
    server = ConnectionOptions(recv_depth=8)
    async with loops.timeout(TIME_LIMIT), connected(address, server=server) as pair:
        send_at_once(pair.client, 8)
        time.sleep(0.2)  # noqa: ASYNC251 - so that the loop has no turn
        await pair.client.aclose()
        assert [message async for message in pair.server] == [b"burst"] * 8


@pytest.mark.transport("IWARP")
async def test_a_slow_reader_on_iwarp_keeps_its_connection(address: DeviceAddress) -> None:
    """Many times recv_depth unread messages: they are copied away, and all can be received."""
    server = ConnectionOptions(recv_depth=16)
    async with loops.timeout(TIME_LIMIT), connected(address, server=server) as pair:
        for number in range(400):
            await pair.client.send(b"%d" % number)
            while pair.server.stats.messages_received <= number:
                await loops.sleep(0)
        assert pair.server.stats.messages_unread == 400
        assert pair.server.stats.spilled > 350
        assert [int(await pair.server.recv()) for _ in range(400)] == list(range(400))


@pytest.mark.transport("IWARP")
async def test_a_reader_that_is_too_slow_on_iwarp_is_told(address: DeviceAddress) -> None:
    server = ConnectionOptions(recv_depth=16, recv_backlog=50)
    async with loops.timeout(TIME_LIMIT), connected(address, server=server) as pair:
        with pytest.raises(PeerClosed):
            await send_one_at_a_time(pair.client.send, pair.server)
        for _ in range(51):
            assert await pair.server.recv() == b"too fast"
        with pytest.raises(ReceiveOverrun, match=r"50 messages \(recv_backlog"):
            await receive_for_ever(pair.server)


@pytest.mark.transport("IWARP")
async def test_a_loop_that_is_too_slow_on_iwarp_is_told(address: DeviceAddress) -> None:
    """The buffers run out before anybody can do anything about it."""
    server = ConnectionOptions(recv_depth=4)
    async with loops.timeout(TIME_LIMIT), connected(address, server=server) as pair:
        with contextlib.suppress(aiordma.VerbsError):  # too late for the rest of them
            send_at_once(pair.client, 40)
        time.sleep(0.2)  # noqa: ASYNC251 - the loop has no turn before it is too late
        for _ in range(5):
            assert await pair.server.recv() == b"burst"
        with pytest.raises(ReceiveOverrun, match="4: recv_depth"):
            await receive_for_ever(pair.server)


SHARED = ConnectionOptions(shared_recv_depth=32, max_message_size=1024)
NEAR = ConnectionOptions(max_message_size=1024)


async def test_connections_share_receive_buffers(address: DeviceAddress) -> None:
    async with (
        loops.timeout(2 * TIME_LIMIT),
        aiordma.listen(address.host, 0, options=SHARED) as listener,
        loops.TaskGroup() as tasks,
    ):
        serving = tasks.create_task(listener.serve(echo))

        async def talk(number: int) -> None:
            async with aiordma.connect(*listener.local_address, options=NEAR) as connection:
                for count in range(20):
                    message = b"%d %d" % (number, count)
                    await connection.send(message)
                    assert await connection.recv() == message

        talking = [tasks.create_task(talk(number)) for number in range(10)]
        await loops.wait(talking)
        await listener.aclose()
        await serving


async def test_what_was_sent_before_the_end_arrives_also_there(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address, NEAR, SHARED) as pair:
        for number in range(10):
            await pair.client.send(b"%d" % number)
        await pair.client.aclose()
        assert [message async for message in pair.server] == [b"%d" % n for n in range(10)]


async def test_one_slow_reader_does_not_hold_the_others_up(address: DeviceAddress) -> None:
    options = ConnectionOptions(shared_recv_depth=16, recv_backlog=100)
    async with (
        loops.timeout(2 * TIME_LIMIT),
        aiordma.listen(address.host, 0, options=options) as listener,
    ):
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
        while slow.server.stats.messages_unread < 80:
            await loops.sleep(0.01)
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
    async with loops.timeout(TIME_LIMIT), connected(address, NEAR, SHARED) as pair:
        await pair.listener.aclose()
        await pair.client.send(b"hello")
        message = await pair.server.recv_message()
        await pair.server.aclose()
        assert bytes(message.data) == b"hello"
        message.release()


async def test_only_a_listener_shares(address: DeviceAddress) -> None:
    with pytest.raises(ValueError, match="shared_recv_depth is for listen"):
        await aiordma.connect(address.host, 1, options=SHARED)
    async with aiordma.listen(address.host, 0, options=SHARED) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address, options=NEAR))
        request = await listener.get_request()
        with pytest.raises(ValueError, match="32 receive buffers of 1024 bytes"):
            await request.accept(options=ConnectionOptions(shared_recv_depth=32))
        accepted = await request.accept()
        async with await connecting, accepted:
            pass


async def test_many_idle_connections_need_few_buffers(address: DeviceAddress) -> None:
    async with (
        loops.timeout(3 * TIME_LIMIT),
        aiordma.listen(address.host, 0, options=SHARED) as listener,
    ):
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
            await loops.sleep(0)  # a hundred at once are much for an emulated machine
        for connection in near + accepted:
            await connection.aclose()


POLLING = ConnectionOptions(busy_poll=0.001)


async def test_polling_finds_what_waiting_would(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), connected(address, POLLING, POLLING) as pair:
        echoing = loops.create_task(echo(pair.server))
        for number in range(100):
            await pair.client.send(b"%d" % number)
            assert await pair.client.recv() == b"%d" % number
        far = await pair.server.register(bytearray(b"polled"))
        near = await pair.client.allocate(6)
        await pair.client.read(far.remote, near)
        assert bytes(memoryview(near)) == b"polled"
        await pair.client.aclose()
        await echoing


async def test_polling_does_not_starve_the_loop(address: DeviceAddress) -> None:
    """Another task runs on while one polls for what never comes."""
    polling = ConnectionOptions(busy_poll=1.0)
    async with loops.timeout(TIME_LIMIT), connected(address, polling, polling) as pair:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await loops.sleep(0)

        counting = loops.create_task(count())
        with pytest.raises(TimeoutError):
            async with loops.timeout(0.5):
                await pair.client.recv()
        counting.cancel()
        assert turns > 20
        await pair.server.send(b"and nothing is lost")
        assert await pair.client.recv() == b"and nothing is lost"
