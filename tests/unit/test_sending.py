"""Sending: send credits, signaling, fences, copies, and memory that is in flight."""

from __future__ import annotations

import errno
import random
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import End, Pair, connected
from simulator.verbs import Region
from simulator.world import SlowCalls

from aiordma import (
    AccessFlags,
    Connection,
    ConnectionOptions,
    LocalClosed,
    PeerClosed,
    VerbsError,
    WorkRequestError,
)
from aiordma.enums import SendFlags, WcStatus, WrOpcode
from aiordma.qp import NUMBER_MASK
from aiordma.verbs import QueuePair

SIGNALED, FENCE = SendFlags.SIGNALED, SendFlags.FENCE
DEPTH = 4
SMALL = ConnectionOptions(send_depth=DEPTH, max_inline=16, max_message_size=1000)
RDMA = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


async def fill(end: End) -> None:
    """Fill the send queue of an end, whose device executes nothing from now on."""
    end.hold()
    while end.sends.credits:
        await end.connection.send(b"x")


async def start(awaitable: Any) -> loops.Task[Any]:
    """Start a task, and let it run until it waits."""
    task = loops.create_task(awaitable)
    await loops.settle()
    return task


async def cancel(task: loops.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(loops.CancelledError):
        await task


async def end_of(pair: Pair) -> None:
    """End the connection at the far side, and wait until the near side has noticed it."""
    pair.far.connection.abort()
    while not pair.near.connection.closed:
        await loops.sleep(0.001)


# --- send credits ---


async def test_senders_wait_for_a_credit_in_order(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        near, far = pair.near, pair.far.connection
        await fill(near)
        tasks = [await start(near.connection.send(b"%d" % number)) for number in range(3)]
        assert (len(near.posts), near.sends.core.waiters) == (DEPTH, 3)
        assert near.connection.stats.messages_sent == DEPTH + simulation.near.is_iwarp
        await near.complete(1)
        assert [task.done() for task in tasks] == [True, False, False]
        await near.complete()
        assert [await far.recv() for _ in range(DEPTH + 3)] == [b"x"] * DEPTH + [b"0", b"1", b"2"]
        assert (near.sends.credits, near.sends.core.waiters) == (DEPTH, 0)
        assert near.connection.stats.send_waits == 3


@pytest.mark.parametrize("nbytes", [1, 100])
@pytest.mark.parametrize("is_registered", [False, True])
async def test_a_cancelled_sender_takes_no_credit(
    simulation: Simulation, nbytes: int, is_registered: bool
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(nbytes)
        data: Any = region if is_registered else bytes(nbytes)
        await near.connection.send(data)
        await near.complete()
        await fill(near)
        first, second = [await start(near.connection.send(data)) for _ in range(2)]
        await cancel(first)
        await near.complete()
        await second
        assert (near.sends.credits, near.pool_is_whole) == (DEPTH, True)
        assert (near.sends.core.waiters, region.references.count) == (0, 0)
        region.close()


@pytest.mark.parametrize("nbytes", [1, 100])
@pytest.mark.parametrize("is_closed_here", [False, True])
async def test_senders_that_wait_raise_the_end_of_the_connection(
    simulation: Simulation, nbytes: int, is_closed_here: bool
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(100)
        await fill(near)
        tasks = [
            await start(near.connection.send(data))
            for data in (bytes(nbytes), region[:nbytes], region)
        ]
        if is_closed_here:
            near.connection.abort()
        else:
            await end_of(pair)
        for task in tasks:
            with pytest.raises(LocalClosed if is_closed_here else PeerClosed):
                await task
        assert near.connection.stats.messages_sent == DEPTH + simulation.near.is_iwarp
        data: Any
        for data in (bytes(nbytes), region, [region, b"copy"]):
            with pytest.raises(LocalClosed if is_closed_here else PeerClosed):
                await near.connection.send(data)
        assert region.references.count == 0
        region.close()


@pytest.mark.parametrize("depth", [1, 5, 40])
async def test_all_waiting_senders_get_a_credit(simulation: Simulation, depth: int) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=depth, max_inline=16)) as pair:
        near, far = pair.near.connection, pair.far.connection

        async def send() -> None:
            for number in range(20):
                await near.send(bytes(number))

        tasks = [loops.create_task(send()) for _ in range(10)]
        assert sum([len(await far.recv()) for _ in range(200)]) == 10 * sum(range(20))
        await loops.gather(*tasks)


async def test_numbers_wrap_below_the_bit_of_receives(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        near, far = pair.near, pair.far.connection
        await near.complete()
        core = near.sends.core
        core.next_number = core.oldest_pending = NUMBER_MASK - 1
        for number in range(3 * DEPTH):
            await near.connection.send(bytes(number))
        assert [len(await far.recv()) for _ in range(3 * DEPTH)] == list(range(3 * DEPTH))
        await near.connection.send(bytes(100))
        await near.complete()
        assert (len(near.sends), near.sends.credits, near.pool_is_whole) == (0, DEPTH, True)


@pytest.mark.parametrize("seed", range(8))
async def test_a_long_exchange_loses_no_message_and_no_credit(
    simulation: Simulation, seed: int
) -> None:
    """Whatever is in the queue: senders never wait for ever, and all memory is released."""
    source = random.Random(seed)
    depth = source.randrange(1, 20)
    options = ConnectionOptions(send_depth=depth, max_inline=16)
    async with connected(simulation, options) as pair:
        near, far = pair.near, pair.far.connection
        region = await near.connection.allocate(1000)
        core = near.sends.core
        await near.complete()
        core.next_number = core.oldest_pending = NUMBER_MASK - 100
        expected = []

        async def receive() -> list[int]:
            return [len(await far.recv()) for _ in range(300)]

        receiving = loops.create_task(receive())
        for number in range(300):
            nbytes = source.randrange(1000) if source.random() < 0.4 else number % 17
            is_registered = source.random() < 0.2
            expected.append(nbytes)
            await near.connection.send(region[:nbytes] if is_registered else bytes(nbytes))
            if source.random() < 0.1:
                await loops.sleep(source.choice((0.0, 1e-5, 1e-3)))
        assert await receiving == expected
        await near.complete()
        near.sends.signal_tail()
        await near.complete()
        assert (len(near.sends), near.sends.credits >= depth) == (0, True)
        assert (near.pool_is_whole, region.references.count, core.in_flight) == (True, 0, 0)
        region.close()


# --- selective signaling ---


@pytest.mark.transport("IB")
@pytest.mark.parametrize(("depth", "every"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 16)])
async def test_one_inline_message_per_interval_is_signaled(
    simulation: Simulation, depth: int, every: int
) -> None:
    options = ConnectionOptions(send_depth=depth, recv_depth=64)
    async with connected(simulation, options, options) as pair:
        await fill(pair.near)
        assert pair.near.flags == [SIGNALED * (not (n + 1) % every) for n in range(depth)]
        await pair.near.complete()
        assert (len(pair.near.sends), pair.near.sends.credits) == (0, depth)


@pytest.mark.transport("IB")
async def test_the_interval_starts_again_after_a_signaled_request(simulation: Simulation) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=16, max_inline=16)) as pair:
        for nbytes in (1, 1, 1, 100, 1, 1, 1, 1):
            await pair.near.connection.send(bytes(nbytes))
        signaled = [bool(flags) for flags in pair.near.flags]
        assert signaled == [False] * 3 + [True] + [False] * 3 + [True]


@pytest.mark.transport("IWARP")
async def test_on_iwarp_every_message_is_signaled(simulation: Simulation) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=64)) as pair:
        await fill(pair.near)
        assert set(pair.near.flags) == {SIGNALED}


@pytest.mark.transport("IB")
async def test_closing_signals_the_newest_requests_and_waits_for_them(
    simulation: Simulation,
) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=8)) as pair:
        near, far = pair.near, pair.far.connection
        await fill(near)
        near.sends.signal_tail()  # the newest request is signaled
        assert len(near.posts) == 8
        near.execute()
        await near.complete()
        near.hold()
        for _ in range(3):
            await near.connection.send(b"tail")
        closing = loops.create_task(near.connection.aclose())
        await loops.settle()
        tail = near.posts[-1]
        assert (tail.opcode, tail.num_sge, tail.flags) == (WrOpcode.RDMA_WRITE, 0, SIGNALED)
        near.sends.signal_tail()  # once is enough
        assert (near.posts[-1], len(near.sends)) == (tail, 4)
        await near.complete()
        await closing
        assert [await far.recv() for _ in range(11)] == [b"x"] * 8 + [b"tail"] * 3


@pytest.mark.transport("IB")
async def test_closing_with_a_full_queue_signals_the_tail_when_there_is_room(
    simulation: Simulation,
) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=10, max_inline=16)) as pair:
        near, far = pair.near, pair.far.connection
        await near.connection.send(bytes(100))
        await near.complete()
        near.hold()
        await near.connection.send(bytes(100))
        await fill(near)
        assert near.flags == [SIGNALED] + [SendFlags(0), SIGNALED] * 4 + [SendFlags(0)]
        closing = loops.create_task(near.connection.aclose())
        await loops.settle()
        assert len(near.sends) == 10
        await near.complete()
        await closing
        assert [len(await far.recv()) for _ in range(11)] == [100, 100] + [1] * 9


@pytest.mark.transport("IB")
async def test_a_refused_signal_of_the_tail_ends_the_closing(simulation: Simulation) -> None:
    async with connected(simulation, ConnectionOptions(send_depth=16)) as pair:
        await pair.near.connection.send(b"x")
        pair.near.refuse(errno.EINVAL)
        began = simulation.world.now
        await pair.near.connection.aclose()
        assert simulation.world.now - began < 1
        assert simulation.world.calls.counts["rdma_disconnect"]


# --- copies ---


@pytest.mark.parametrize(("nbytes", "is_inline"), [(0, True), (16, True), (17, False)])
async def test_small_messages_are_sent_inline_and_larger_ones_copied(
    simulation: Simulation, nbytes: int, is_inline: bool
) -> None:
    async with connected(simulation, SMALL) as pair:
        near, data = pair.near, bytearray(range(nbytes))
        imm = None if simulation.near.is_iwarp else 7
        near.hold()
        await near.connection.send(data, imm=imm)
        data += b"resized"
        assert bool(near.posts[-1].flags & SendFlags.INLINE) is is_inline
        assert near.pool_is_whole is is_inline
        await near.complete()
        assert near.pool_is_whole
        message = await pair.far.connection.recv_message()
        assert (bytes(message.data), message.imm) == (bytes(range(nbytes)), imm)
        message.release()


async def test_a_message_larger_than_the_limit_is_refused(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near.connection
        region = await near.allocate(1001)
        sent = near.stats.messages_sent
        with pytest.raises(ValueError, match="a message of 1001 bytes; max_message_size is 1000"):
            await near.send(bytes(1001))
        data: Any
        for data in (region, [region[:1000], b"x"]):
            with pytest.raises(ValueError, match="1001 bytes do not fit into a max_message_size"):
                await near.send(data)
        assert (near.stats.messages_sent, region.references.count) == (sent, 0)
        await near.send(bytes(1000))
        await near.send(region[:1000])
        assert near.stats.bytes_sent - 5 * simulation.near.is_iwarp == 2000
        region.close()


@pytest.mark.parametrize("nbytes", [1, 100])
async def test_a_refused_message_ends_the_connection(simulation: Simulation, nbytes: int) -> None:
    """A refused request is treated as posted: the device can still read its buffer."""
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        for _ in range(DEPTH):
            await near.connection.send(bytes(100))
        await near.complete()
        near.refuse(errno.EINVAL)
        for _ in range(2):
            with pytest.raises(VerbsError, match="ibv_post_send") as caught:
                await near.connection.send(bytes(nbytes))
            assert caught.value.errno == errno.EINVAL
            near.refuse(0)  # from now on the device would accept it
        assert near.connection.stats.messages_sent == DEPTH + simulation.near.is_iwarp
        assert (len(near.sends), near.pool_is_whole) == (0, nbytes == 1)


async def test_a_refusal_on_iwarp_can_mean_that_the_peer_has_gone(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        pair.near.refuse(errno.ENOTCONN)
        with pytest.raises(PeerClosed if simulation.near.is_iwarp else VerbsError):
            await pair.near.connection.send(b"x")


async def test_a_failed_registration_is_raised_and_the_connection_goes_on(
    simulation: Simulation,
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near.connection
        for data in (bytes(100), [b"x" * 50, b"y" * 50]):
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
            with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
                await near.send(data)
        assert pair.near.sends.credits >= DEPTH - 1
        await near.send(b"x" * 100)
        assert await pair.far.connection.recv() == b"x" * 100


@pytest.mark.parametrize("how", ["cancelled", "closed", "ended"])
async def test_a_send_that_ends_while_it_registers_a_buffer(
    simulation: Simulation, how: str
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(100)
        simulation.world.schedule = SlowCalls(ibv_reg_mr_iova2=1.0)
        sent = len(near.posts)
        sources: list[Any] = [bytes(100), [region, bytes(100)]]
        tasks = [await start(near.connection.send(data)) for data in sources]
        await loops.sleep(0.01)
        if how == "cancelled":
            for task in tasks:
                await cancel(task)
        elif how == "closed":
            near.connection.abort()
        else:
            await end_of(pair)
        await loops.sleep(2)
        if how != "cancelled":
            for task in tasks:
                with pytest.raises(LocalClosed if how == "closed" else PeerClosed):
                    await task
        if how == "cancelled":
            assert near.pool_is_whole
            assert len(near.posts) == sent
        assert region.references.count == 0
        region.close()


# --- registered memory ---


@pytest.mark.parametrize("imm", [None, 0, 7])
async def test_registered_memory_is_sent_in_place(simulation: Simulation, imm: int | None) -> None:
    imm = None if simulation.near.is_iwarp else imm
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(50)
        memoryview(region)[:] = b"r" * 50
        await near.connection.send(bytes(20))
        near.hold()
        task = await start(near.connection.send([region, region[:5], b"copy"], imm=imm))
        while region.references.count < 2:
            await loops.sleep(0)
        post = near.posts[-1]
        assert (post.num_sge, post.address, post.length) == (3, region.addr, 50)
        assert (region.references.count, near.flags[-1]) == (2, SIGNALED)
        region.close()  # it stays registered until the request has completed
        assert not task.done()
        await near.complete()
        await task
        assert (region.references.count, near.pool_is_whole) == (0, True)
        assert len(await pair.far.connection.recv()) == 20
        with await pair.far.connection.recv_message() as message:
            assert (bytes(message.data), message.imm) == (b"r" * 55 + b"copy", imm)


async def test_cancelling_keeps_posted_memory_until_its_completion(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(50)
        near.hold()
        await cancel(await start(near.connection.send(region)))
        region.close()
        await loops.sleep(1)
        assert region.references.count == 1
        assert any(one.key == region.lkey for one in simulation.world.all(Region))
        await near.complete()
        assert await pair.far.connection.recv() == bytes(50)
        await loops.sleep(1)
        assert not any(one.key == region.lkey for one in simulation.world.all(Region))


@pytest.mark.parametrize("is_list", [False, True])
async def test_refused_registered_memory_is_kept_until_the_queue_pair_is_destroyed(
    simulation: Simulation, is_list: bool
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(100, RDMA)
        near.refuse(errno.EINVAL)
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await near.connection.send([region[:10], region[50:]] if is_list else region)
        assert region.references.count == 1 + is_list
        assert near.connection.stats.messages_sent == simulation.near.is_iwarp
        await near.connection.aclose()
        assert region.references.count == 0
        region.close()


async def test_a_failed_send_and_those_behind_it_raise_the_cause(simulation: Simulation) -> None:
    """The receives of the peer are smaller than the message."""
    async with connected(simulation, SMALL, ConnectionOptions(max_message_size=10)) as pair:
        near = pair.near
        region = await near.connection.allocate(100)
        near.hold()
        tasks = [await start(near.connection.send(part)) for part in (region, region[:5])]
        await near.complete()
        for task in tasks:
            with pytest.raises((WorkRequestError, PeerClosed)) as caught:
                await task
            if isinstance(caught.value, WorkRequestError):
                assert caught.value.status is WcStatus.REM_INV_REQ_ERR
        assert region.references.count == 0
        region.close()


async def test_requests_of_a_device_that_flushes_nothing_end_with_the_queue_pair(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting tasks go on, but the memory is kept: the device might still use it."""
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(100)
        await near.connection.send(bytes(100))
        near.hold()
        await near.connection.send(bytes(100))
        sources: list[Any] = [region, [region, b"copy"]]
        tasks = [await start(near.connection.send(data)) for data in sources]
        await loops.sleep(0.01)
        monkeypatch.setattr(simulation.network, "_flush", lambda qp: None)
        await end_of(pair)
        await loops.sleep(1)
        assert [task.done() for task in tasks] == [simulation.near.is_iwarp] * 2
        for task in tasks:
            with pytest.raises(PeerClosed):
                await task
        assert region.references.count == 2
        await near.connection.aclose()
        assert region.references.count == 0
        region.close()


async def test_memory_of_another_device_is_refused(simulation: Simulation) -> None:
    async with connected(simulation, SMALL) as pair:
        region = await pair.far.connection.allocate(100)
        data: Any
        for data in (region, [b"copy", region]):
            with pytest.raises(ValueError, match="registered on another device"):
                await pair.near.connection.send(data)
        region.close()
        with pytest.raises(ValueError, match="closed"):
            await pair.far.connection.send(region)


# --- Ctrl-C ---


class CtrlC(BaseException):
    """Like KeyboardInterrupt, it can come after any call."""


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_posted", [False, True])
async def test_a_ctrl_c_while_posting_keeps_the_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    async with connected(simulation, SMALL) as pair:
        near = pair.near
        region = await near.connection.allocate(100)
        post_list = QueuePair.post_list

        def interrupted(qp: QueuePair, *arguments: Any, **more: Any) -> None:
            if is_posted:
                post_list(qp, *arguments, **more)
            raise CtrlC

        async def send() -> bool:
            try:
                await near.connection.send([region[:10], region[50:]])
            except CtrlC:
                return True
            return False

        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "post_list", interrupted)
            assert await send()
        assert region.references.count == 2  # it is not known if the request was posted
        await near.connection.send(b"x")
        await near.complete()
        assert (region.references.count, near.sends.credits) == (0, DEPTH)
        received = [await pair.far.connection.recv() for _ in range(1 + is_posted)]
        assert [len(message) for message in received] == ([60] if is_posted else []) + [1]
        region.close()


# --- fences ---


async def test_requests_are_fenced_until_all_cancelled_reads_have_ended(
    simulation: Simulation,
) -> None:
    async with connected(simulation, ConnectionOptions(max_inline=16)) as pair:
        near, far = pair.near, pair.far.connection
        region = await near.connection.allocate(100, RDMA)
        source = await far.allocate(100, RDMA)
        await near.connection.send(bytes(100))
        near.hold()
        reads = [await start(near.connection.read(source.remote, region)) for _ in range(3)]
        for number in (0, 2):
            await cancel(reads[number])
        begin = len(near.posts)
        for data in (b"x", bytes(100)):
            await near.connection.send(data)
        writes = [
            await start(near.connection.write(data, source.remote)) for data in (b"x", region)
        ]
        reads.append(await start(near.connection.read(source.remote, region)))
        assert [FENCE in flags for flags in near.flags[begin:]] == [True] * 4 + [False]
        await near.complete(2)
        await near.connection.send(b"still fenced")
        assert FENCE in near.flags[-1]
        await near.complete()
        await near.connection.send(b"not fenced")
        assert FENCE not in near.flags[-1]
        await loops.gather(reads[1], reads[3], *writes)
        assert region.references.count == 0
        region.close()
        source.close()


async def test_a_read_that_ended_before_it_was_cancelled_leaves_no_fence(
    simulation: Simulation,
) -> None:
    async with connected(simulation) as pair:
        near, far = pair.near, pair.far.connection
        region = await near.connection.allocate(100, RDMA)
        source = await far.allocate(100, RDMA)
        for into in (region, [region[:10], region[50:90]]):
            near.hold()
            task = await start(near.connection.read(source.remote[:50], into))
            near.execute()
            task.cancel()
            await loops.wait([task])
            await loops.sleep(0.01)
            await near.connection.send(b"x")
            assert FENCE not in near.flags[-1]
        region.close()
        source.close()


async def test_a_connection_that_was_dropped_is_aborted(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        connection: Connection = pair.near.connection
        assert repr(connection).endswith("open>")
        connection.abort()
        assert repr(connection).endswith("closed>")
