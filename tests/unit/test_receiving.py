"""Receiving: each message is received once and in order, and its slot is posted again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import End, Pair, connected

import aiordma
from aiordma.dispatch import BusyPoll

SLOTS = 4
SIZE = 64
SENDER = aiordma.ConnectionOptions(max_message_size=SIZE, max_inline=0)
FAR = {"recv_depth": SLOTS, "max_message_size": SIZE, "recv_backlog": 10, "adaptive_poll": False}


def pair_of(simulation: Simulation, **more: Any) -> Any:
    """Return a pair whose far end has SLOTS receives. On iWARP, the library posts one more."""
    return connected(simulation, SENDER, aiordma.ConnectionOptions(**(FAR | more)))


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


def numbers(*interval: int) -> list[bytes]:
    return [b"%d" % number for number in range(*interval)]


async def test_a_task_waits_for_a_message(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far, waits = pair.far, pair.far.connection.stats.recv_waits
        registered = simulation.world.keys[far.data_path._ring._region.lkey]
        assert registered.access == aiordma.AccessFlags.LOCAL_WRITE  # the peer cannot access it
        assert registered.length == (SLOTS + simulation.far.is_iwarp) * SIZE
        await arrive(pair, b"there already")
        assert await far.connection.recv_into(bytearray(20)) == 13
        assert (far.connection.stats.recv_waits, free_slots(far)) == (waits, SLOTS)
        task = await start_recv(far)
        for _ in range(3):  # without a message
            far.data_path.wake()
            await loops.sleep(0.001)
        assert (far.data_path.receiver.queue.take_bytes(), task.done()) == (None, False)
        await pair.near.connection.send(b"hello")
        simulation.world.settle(0.01)
        with pytest.raises(aiordma.BusyError):  # the message is for the task that waits
            await far.connection.recv()
        assert (await task, far.data_path.receiver.is_waited_for) == (b"hello", False)
        assert far.connection.stats.recv_waits == waits + 1


@pytest.mark.parametrize("is_spilled", [False, True])
async def test_a_message_that_does_not_fit_stays(simulation: Simulation, is_spilled: bool) -> None:
    async with pair_of(simulation, recv_depth=1 if is_spilled else SLOTS) as pair:
        far = pair.far.connection
        await arrive(pair, b"hello", b"", b"too late")
        memory = bytearray(b"----")
        for _ in range(2):
            with pytest.raises(ValueError, match="a message of 5 bytes does not fit into 4"):
                await far.recv_into(memory)
        assert (memory, await far.recv()) == (bytearray(b"----"), b"hello")
        assert await far.recv_into(bytearray()) == 0
        far.abort()
        assert pair.far.data_path.receiver.queue.take_bytes() is None
        for call in (far.recv, far.recv_message):
            with pytest.raises(aiordma.LocalClosed):
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
            pair.far.data_path._callbacks.fail(aiordma.PeerClosed("gone"))
            assert await task == b"last"
            task = await start_recv(pair.far)
            await loops.sleep(1)
            assert not task.done()  # there can still be messages before the flushed receives
        flush(pair.far.qp)
        with pytest.raises(aiordma.PeerClosed):
            await task


@pytest.mark.parametrize("kind", ["taken", "last", "held"])
async def test_a_slot_that_is_refused_loses_no_message(simulation: Simulation, kind: str) -> None:
    async with pair_of(simulation) as pair:
        far, messages = pair.far.connection, numbers(1 if kind == "last" else 2)
        await arrive(pair, *messages)
        pair.far.refuse_receives(errno.ENOMEM)
        if kind == "held":
            with await far.recv_message() as message:
                assert bytes(message.data) == messages.pop(0)
            assert far.closed
        assert [await far.recv() for _ in messages] == messages
        with pytest.raises(aiordma.VerbsError, match="ibv_post_recv") as caught:
            await far.recv()
        assert (caught.value.errno, far.closed) == (errno.ENOMEM, True)


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize(("slots", "kept"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)])
async def test_messages_are_spilled(simulation: Simulation, slots: int, kept: int) -> None:
    async with pair_of(simulation, recv_depth=slots) as pair:
        far = pair.far.connection
        for number in range(1, 11):
            await arrive(pair, b"%d" % number)
            assert far.stats.spilled == max(0, number - kept)
            assert free_slots(pair.far) == slots - min(number, kept)
        held = await far.recv_message()
        assert bytes(held.data) == b"1"
        assert [await far.recv() for _ in range(2, 10)] == numbers(2, 10)
        with await far.recv_message() as spilled:  # it has no slot
            assert (bytes(spilled.data), far.stats.messages_held) == (b"10", 2)
        held.release()
        assert (free_slots(pair.far), far.stats.messages_held) == (slots, 0)


@pytest.mark.transport("IWARP")
async def test_a_failed_repost_while_spilling_loses_no_message(simulation: Simulation) -> None:
    async with pair_of(simulation, recv_depth=1) as pair:
        await arrive(pair, b"0")
        pair.far.refuse_receives(errno.ENOMEM)
        await arrive(pair, b"1")
        assert [await pair.far.connection.recv() for _ in range(2)] == numbers(2)
        with pytest.raises(aiordma.VerbsError, match="ibv_post_recv"):
            await pair.far.connection.recv()


@pytest.mark.loops("asyncio")
async def test_recv_polls_once_before_it_waits(simulation: Simulation) -> None:
    async with pair_of(simulation) as pair:
        far, queue = pair.far.connection, pair.far.qp.recv_cq.pointer
        await pair.near.connection.send(b"polled")
        pair.far.data_path._resources.loop_device.dispatcher.budget = 10**18  # it does not end
        simulation.world.settle(0.01)  # the message arrives while the program does nothing
        polls = queue.polls
        receiving: Any = far.recv()
        with pytest.raises(StopIteration) as caught:  # it does not wait
            receiving.send(None)
        assert (caught.value.value, queue.polls) == (b"polled", polls + 1)
        await arrive(pair, b"there already")
        polls = queue.polls
        assert (await far.recv(), queue.polls) == (b"there already", polls)
        task = await start_recv(pair.far)
        assert queue.polls == polls + 1
        await arrive(pair, b"hello")
        assert await task == b"hello"


@pytest.mark.loops("trio")
async def test_a_message_that_another_task_takes_meanwhile_is_not_returned(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender of a message stream takes CREDIT although another task waits."""
    async with pair_of(simulation, busy_poll=1e-3) as pair:
        receiver = pair.far.data_path.receiver

        async def poll(busy: BusyPoll, is_over: Callable[[], bool], *arguments: object) -> bool:
            await arrive(pair, b"taken")
            return is_over()

        async def take() -> None:
            assert len(receiver) == 1
            receiver.abandon()

        monkeypatch.setattr(BusyPoll, "until_adaptively", poll)
        receiver._schedule_point = take
        receiving = loops.create_task(pair.far.connection.recv_message())
        await loops.sleep(1)
        await arrive(pair, b"waited for")
        with await receiving as message:
            assert bytes(message.data) == b"waited for"
