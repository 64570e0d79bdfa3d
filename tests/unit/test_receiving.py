"""Receiving: each message is received once and in order, and its slot is posted again."""

from __future__ import annotations

import errno
import gc
import random
from collections import deque
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import End, Pair, connected
from simulator.queues import Queues

from aiordma import (
    AccessFlags,
    BusyError,
    ConnectionOptions,
    LocalClosed,
    Message,
    PeerClosed,
    ReceiveOverrun,
    VerbsError,
)
from aiordma._native import fast_path
from aiordma.memory import AllocatedRegion
from aiordma.qp import ReceiveRing

SLOTS = 4
SIZE = 64
OPTIONS = ConnectionOptions(
    recv_depth=SLOTS, max_message_size=SIZE, recv_backlog=10, adaptive_poll=False
)
SENDER = ConnectionOptions(max_message_size=SIZE, max_inline=0)
LONG = 10**18
"""A time budget of the loop that does not end, in nanoseconds."""


def pair_of(simulation: Simulation, **more: Any) -> Any:
    """Return a pair whose far end has SLOTS receives. On iWARP, the library posts one more."""
    options = {name: getattr(OPTIONS, name) for name in ConnectionOptions.__slots__} | more
    return connected(simulation, SENDER, ConnectionOptions(**options))


async def arrive(pair: Pair, *messages: bytes) -> None:
    """Send messages, and let them arrive."""
    for message in messages:
        await pair.near.connection.send(message)
    await loops.sleep(0.01)


async def start_recv(end: End) -> loops.Task[bytes]:
    task = loops.create_task(end.connection.recv())
    await loops.sleep(1e-5)
    assert end.data_path.receiver.is_waited_for
    return task


def free_slots(end: End) -> int:
    """Return the number of slots that are posted, apart from the additional one of iWARP."""
    posted: int = end.receives_posted - end.qp.device.is_iwarp
    assert end.connection.stats.receives_posted == end.receives_posted
    return posted


# --- one message ---


async def test_messages_are_received_in_order_and_their_slots_are_posted_again(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far
        messages = [b"", bytes(range(SIZE))]
        await arrive(pair, *messages)
        before = far.connection.stats
        assert (before.messages_unread, free_slots(far)) == (2, SLOTS - 2)
        received = [await far.connection.recv() for _ in messages]
        assert (received, type(received[1])) == (messages, bytes)
        await arrive(pair, b"later" * 12)
        assert received == messages  # they are copies
        assert len(await far.connection.recv()) == 60
        stats = far.connection.stats
        assert (stats.bytes_received - 5 * simulation.near.is_iwarp, free_slots(far)) == (124, 4)
        assert stats.recv_waits - before.recv_waits == 0


async def test_recv_without_a_message_waits_for_one(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        waits = pair.far.connection.stats.recv_waits
        task = await start_recv(pair.far)
        for _ in range(3):  # without a message
            pair.far.data_path.wake()
            await loops.sleep(0.001)
        assert not task.done()
        await arrive(pair, b"hello")
        assert await task == b"hello"
        assert not pair.far.data_path.receiver.is_waited_for
        assert pair.far.connection.stats.recv_waits == waits + 1


@pytest.mark.parametrize("arrives", [False, True])
async def test_cancelling_loses_no_message(simulation: Simulation, arrives: bool) -> None:
    async with pair_of(simulation) as pair:
        task = await start_recv(pair.far)
        if arrives:
            await pair.near.connection.send(b"hello")
            simulation.world.settle(0.01)
        task.cancel()
        await loops.wait([task])
        if not arrives:
            await arrive(pair, b"hello")
        received = task.result() if not task.cancelled() else await pair.far.connection.recv()
        assert received == b"hello"
        assert free_slots(pair.far) == SLOTS


async def test_a_second_task_that_receives_gets_a_busy_error(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        task = await start_recv(pair.far)
        for call in (far.recv, lambda: far.recv_into(bytearray(10)), far.recv_message):
            with pytest.raises(BusyError):
                await call()
        assert far._take_message() is None
        await pair.near.connection.send(b"hello")
        simulation.world.settle(0.01)
        with pytest.raises(BusyError):  # the message is for the task that waits
            await far.recv()
        assert await task == b"hello"


# --- into a buffer ---


async def test_a_message_is_copied_to_the_beginning_of_a_buffer(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        await arrive(pair, b"hello", b"exact", b"")
        memory = bytearray(b"----------")
        assert await far.recv_into(memory) == 5
        assert memory == b"hello-----"
        async with await far.allocate(5) as region:
            assert await far.recv_into(region[:5]) == 5
            assert bytes(memoryview(region)) == b"exact"
        assert await far.recv_into(memory) == 0
        for buffer in (b"read-only", memoryview(bytearray(10))[::2]):
            with pytest.raises(BufferError):
                await far.recv_into(buffer)
        assert free_slots(pair.far) == SLOTS


async def test_an_empty_message_fits_into_an_empty_buffer(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        await arrive(pair, b"")
        assert await pair.far.connection.recv_into(bytearray()) == 0


@pytest.mark.parametrize("is_spilled", [False, True])
async def test_a_message_that_does_not_fit_is_received_by_the_next_call(
    simulation: Simulation, is_spilled: bool
) -> None:
    async with pair_of(simulation, recv_depth=1 if is_spilled else SLOTS) as pair:
        far = pair.far.connection
        await arrive(pair, b"hello", b"then")
        memory = bytearray(b"----")
        for _ in range(2):
            with pytest.raises(ValueError, match="a message of 5 bytes does not fit into 4"):
                await far.recv_into(memory)
        assert memory == b"----"
        assert [await far.recv() for _ in range(2)] == [b"hello", b"then"]


# --- held by the user ---


async def test_a_slot_is_not_posted_while_its_message_is_held(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far
        await arrive(pair, b"first", b"second")
        first, second = [await far.connection.recv_message() for _ in range(2)]
        assert (far.connection.stats.messages_held, free_slots(far)) == (2, 2)
        second.release()
        first.release()
        first.release()
        assert (far.connection.stats.messages_held, free_slots(far)) == (0, 4)
        await arrive(pair, b"dropped")
        message: Message | None = await far.connection.recv_message()
        assert message is not None
        assert bytes(message.data) == b"dropped"
        del message
        gc.collect()
        assert free_slots(far) == 3  # the loop posts it: another thread can drop the message
        await loops.sleep(0.001)
        assert (far.connection.stats.messages_held, free_slots(far)) == (0, 4)


async def test_a_message_outlives_its_connection(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        await arrive(pair, b"hello")
        message = await pair.far.connection.recv_message()
        await pair.far.connection.aclose()
        assert bytes(message.data) == b"hello"
        message.release()


@pytest.mark.transport("IB")
async def test_immediate_data_and_invalidated_keys_arrive_with_messages(
    simulation: Simulation,
) -> None:
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
    async with pair_of(simulation, recv_depth=8) as pair:
        near, far = pair.near.connection, pair.far.connection
        region = await far.allocate(100, access)
        window = await far.bind(region, AccessFlags.REMOTE_WRITE)
        await arrive(pair, b"plain")
        await near.send(b"number", imm=0)
        await near.write(b"w" * 10, window.remote, imm=0xFEEDBEEF)
        for data in (b"key", await near.allocate(3)):
            remote = window.remote if isinstance(data, bytes) else (await far.bind(region)).remote
            await near.send(data, invalidate=remote)
            keys = remote.rkey
        received = [await far.recv_message() for _ in range(4)]
        received[0].release()
        received.append(await far.recv_message())
        assert [(len(one), one.imm) for one in received] == [
            (5, None), (6, 0), (0, 0xFEEDBEEF), (3, None), (3, None),
        ]  # fmt: skip
        assert [one.invalidated for one in received] == [None] * 3 + [window.remote.rkey, keys]
        assert bytes(memoryview(region)[:10]) == b"w" * 10
        for one in received:
            one.release()
        assert far.stats.bytes_received == 5 + 6 + 3 + 3
        with pytest.raises(ValueError, match="immediate data or invalidates a key, not both"):
            await near.send(b"both", imm=1, invalidate=window.remote)
        window.close()
        region.close()


# --- the end ---


async def test_messages_that_arrived_before_the_end_are_received_first(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        await arrive(pair, b"one", b"two")
        await pair.near.connection.aclose()
        await loops.sleep(0.01)
        assert far._take_message() in (b"one", None)  # None on trio
        assert [message async for message in far] in ([b"one", b"two"], [b"two"])
        for call in (far.recv, far.recv_message, lambda: far.recv_into(bytearray(9))):
            with pytest.raises(PeerClosed):
                await call()


@pytest.mark.transport("IB")
async def test_the_end_is_raised_after_all_receives_have_completed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair_of(simulation) as pair:
        flush = simulation.network._flush_receives
        task = await start_recv(pair.far)
        with monkeypatch.context() as patch:
            patch.setattr(simulation.network, "_flush_receives", lambda qp: None)
            await pair.near.connection.send(b"last")
            simulation.world.settle(0.01)
            pair.far.data_path._callbacks.fail(PeerClosed("gone"))
            assert await task == b"last"
            task = await start_recv(pair.far)
            await loops.sleep(1)
            assert not task.done()  # there can still be messages before the flushed receives
        flush(pair.far.qp)
        with pytest.raises(PeerClosed):
            await task


async def test_after_a_local_close_nothing_is_received(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        await arrive(pair, b"too late")
        far.abort()
        assert far._take_message() is None
        for call in (far.recv, far.recv_message):
            with pytest.raises(LocalClosed):
                await call()
        task = await start_recv(pair.near)
        pair.near.connection.abort()
        with pytest.raises(LocalClosed):
            await task


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_message_whose_slot_cannot_be_posted_again_is_not_lost(
    simulation: Simulation, is_waiting: bool
) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        await arrive(pair, b"hello", *([] if is_waiting else [b"then"]))
        pair.far.refuse_receives(errno.ENOMEM)
        assert await far.recv() == b"hello"
        if not is_waiting:
            assert await far.recv() == b"then"
        with pytest.raises(VerbsError, match="ibv_post_recv") as caught:
            await far.recv()
        assert caught.value.errno == errno.ENOMEM
        assert far.closed


async def test_a_held_message_whose_slot_cannot_be_posted_ends_the_connection(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation) as pair:
        await arrive(pair, b"hello")
        pair.far.refuse_receives(errno.ENOMEM)
        with await pair.far.connection.recv_message() as message:
            assert bytes(message.data) == b"hello"
        assert pair.far.connection.closed


# --- spilling, where nothing holds the peer back ---


@pytest.mark.transport("IB")
async def test_without_a_backlog_messages_fill_all_slots_and_hold_the_peer_back(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation) as pair:
        await arrive(pair, *[b"%d" % number for number in range(10)])
        assert free_slots(pair.far) == 0
        assert pair.far.connection.stats.messages_unread == SLOTS
        assert [await pair.far.connection.recv() for _ in range(10)] == [
            b"%d" % n for n in range(10)
        ]
        assert pair.far.connection.stats.spilled == 0


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize(("slots", "kept"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)])
async def test_messages_are_spilled_once_half_of_the_slots_are_full(
    simulation: Simulation, slots: int, kept: int
) -> None:
    async with pair_of(simulation, recv_depth=slots) as pair:
        far = pair.far.connection
        for number in range(1, 11):
            await arrive(pair, b"%d" % number)
            assert far.stats.spilled == max(0, number - kept)
            assert free_slots(pair.far) == slots - min(number, kept)
        held = await far.recv_message()
        assert bytes(held.data) == b"1"
        assert [await far.recv() for _ in range(2, 10)] == [b"%d" % n for n in range(2, 10)]
        with await far.recv_message() as spilled:  # it has no slot
            assert (bytes(spilled.data), far.stats.messages_held) == (b"10", 2)
        held.release()
        assert (free_slots(pair.far), far.stats.messages_held) == (slots, 0)


@pytest.mark.transport("IWARP")
async def test_more_messages_than_the_backlog_are_an_overrun(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        for number in range(30):  # a reader that keeps up causes none
            await arrive(pair, b"%d" % number)
            assert await far.recv() == b"%d" % number
        await arrive(pair, *[b"%d" % number for number in range(10)])
        assert not far.closed
        await arrive(pair, b"10")
        assert far.closed
        assert [await far.recv() for _ in range(11)] == [b"%d" % number for number in range(11)]
        with pytest.raises(ReceiveOverrun, match=r"more than 10 messages \(recv_backlog\)"):
            await far.recv()


@pytest.mark.transport("IWARP")
async def test_a_failed_repost_while_spilling_loses_no_message(simulation: Simulation) -> None:
    async with pair_of(simulation, recv_depth=1) as pair:
        await arrive(pair, b"one")
        pair.far.refuse_receives(errno.ENOMEM)
        await arrive(pair, b"two")
        received = [await pair.far.connection.recv() for _ in range(2)]
        assert received == [b"one", b"two"]
        with pytest.raises(VerbsError, match="ibv_post_recv"):
            await pair.far.connection.recv()


# --- polling ---


async def hidden(pair: Pair, message: bytes) -> None:
    """Send a message, and let it arrive while the program does nothing."""
    await pair.near.connection.send(message)
    pair.far.data_path._resources.loop_device.dispatcher.budget = LONG
    simulation = pair.far._simulation
    simulation.world.settle(0.01)


def polls_of(end: End) -> int:
    """Return the number of polls of the completion queue."""
    return int(end.qp.recv_cq.pointer.polls)


def value_of(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not wait."""
    with pytest.raises(StopIteration) as caught:
        coroutine.send(None)
    return caught.value.value


@pytest.mark.loops("asyncio")
async def test_recv_polls_once_before_it_waits(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far = pair.far.connection
        await hidden(pair, b"polled")
        polls = polls_of(pair.far)
        assert value_of(far.recv()) == b"polled"
        assert polls_of(pair.far) == polls + 1
        await arrive(pair, b"there already")
        polls = polls_of(pair.far)
        assert await far.recv() == b"there already"
        assert polls_of(pair.far) == polls
        task = await start_recv(pair.far)
        assert polls_of(pair.far) == polls + 1
        await arrive(pair, b"hello")
        assert await task == b"hello"


@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("method", ["recv", "recv_into", "recv_message"])
async def test_with_busy_poll_each_receive_polls(simulation: Simulation, method: str) -> None:
    async with pair_of(simulation, busy_poll=1e-3) as pair:
        far, memory = pair.far.connection, bytearray(SIZE)
        dispatcher = pair.far.data_path._resources.loop_device.dispatcher
        for is_preempted in (False, True):
            await hidden(pair, b"polled")
            if is_preempted:
                dispatcher.budget_start = dispatcher.budget = 0
            match method:
                case "recv_into":
                    assert await far.recv_into(memory) == 6
                    assert memory[:6] == b"polled"
                case "recv":
                    assert await far.recv() == b"polled"
                case "recv_message":
                    with await far.recv_message() as message:
                        assert bytes(message.data) == b"polled"
        assert not pair.far.data_path.receiver.is_waited_for


@pytest.mark.loops("trio")
async def test_on_trio_a_receive_passes_a_checkpoint_before_it_polls(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation, busy_poll=1e-3) as pair:
        task = loops.create_task(pair.far.connection.recv())
        await loops.settle()
        await hidden(pair, b"polled")
        assert await task == b"polled"
        await hidden(pair, b"there already")
        assert await pair.far.connection.recv() == b"there already"


@pytest.mark.parametrize("busy_poll", [0.0, 1e-3])
async def test_after_a_failed_wait_another_task_can_wait(
    simulation: Simulation, busy_poll: float
) -> None:
    async with pair_of(simulation, busy_poll=busy_poll) as pair:
        receiver = pair.far.data_path.receiver
        budget = receiver.queue.poll_budget
        receiver.queue.poll_budget = 1
        receiver._busy, busy = None, receiver._busy
        with pytest.raises(AttributeError):
            await receiver._wait(False)
        receiver._busy, receiver.queue.poll_budget = busy, budget
        assert not receiver.is_waited_for
        await arrive(pair, b"hello")
        assert await pair.far.connection.recv() == b"hello"


# --- long exchanges ---


@pytest.mark.parametrize("seed", range(6))
async def test_a_long_exchange_loses_no_byte_and_no_slot(simulation: Simulation, seed: int) -> None:
    source = random.Random(seed)
    async with pair_of(simulation, recv_backlog=1000) as pair:
        near, far = pair.near.connection, pair.far.connection
        sent: deque[bytes] = deque()
        held: list[tuple[Message, bytes]] = []
        for _ in range(400):
            if len(sent) < 40 and source.random() < 0.5:
                sent.append(source.randbytes(source.randrange(SIZE + 1)))
                await near.send(sent[-1])
            elif held and source.random() < 0.6:
                message, expected = held.pop(source.randrange(len(held)))
                with message:
                    assert message.data == expected
            elif sent:
                expected, kind = sent.popleft(), source.randrange(3)
                if kind == 0:
                    assert await far.recv() == expected
                elif kind == 1 or len(held) >= SLOTS - 2:
                    memory = bytearray(SIZE)
                    length = await far.recv_into(memory)
                    assert memory[:length] == expected
                else:
                    held.append((await far.recv_message(), expected))
            assert far.stats.messages_held == len(held)
        for message, _ in held:
            message.release()
        for expected in sent:
            assert await far.recv() == expected
        await loops.sleep(1)
        assert free_slots(pair.far) == SLOTS


# --- ReceiveRing ---


class Region:
    """Memory with the attributes of an AllocatedRegion, which is not registered."""

    def __init__(self, nbytes: int) -> None:
        self.view, self.address, self.lkey = memoryview(bytearray(nbytes)), 0x10000, 7
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Poster:
    """A queue of receives of a Queues."""

    def __init__(self, verbs: Queues) -> None:
        self.cells = (verbs.qp_cell, 0)


def test_a_ring_posts_its_slots_until_it_is_stopped(verbs: Queues) -> None:
    ring = ReceiveRing(SLOTS, SIZE)
    region: Any = Region(SLOTS * SIZE)
    ring.use_region(region)
    poster: Any = Poster(verbs)
    ring.post_all(poster, 5 << 32)
    assert [post.wr_id & 0xFF for post in verbs.posts] == [0, 1, 2, 3]
    assert [post.address - 0x10000 for post in verbs.posts] == [0, SIZE, 2 * SIZE, 3 * SIZE]
    for _ in range(2):
        ring.completed()
    assert ring.posted == SLOTS - 2
    region.view[SIZE : SIZE + 3] = b"one"
    assert bytes(ring.view(1, 3)) == b"one"
    verbs.refuse(errno.ENOMEM)
    with pytest.raises(VerbsError, match="ibv_post_recv"):
        ring.post(1)
    verbs.refuse(0)
    ring.post(1)
    ring.close()
    ring.post(0)
    assert (ring.posted, verbs.posted, region.is_closed) == (SLOTS - 1, SLOTS + 1, True)
    ReceiveRing(SLOTS, SIZE).close()  # without memory


async def test_the_memory_of_a_ring_is_registered_for_local_writes(
    simulation: Simulation,
) -> None:
    async with pair_of(simulation) as pair:
        region = pair.far.data_path._ring._region
        assert isinstance(region, AllocatedRegion)
        registered = simulation.world.keys[region.lkey]
        assert registered.access == AccessFlags.LOCAL_WRITE
        assert registered.length == (SLOTS + simulation.far.is_iwarp) * SIZE
        assert isinstance(pair.far.data_path.receiver.queue, fast_path.ReceiveQueue)
