"""Sending: send credits, signaling, fences, copies, and memory that is in flight."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.pairs import CtrlC, End, Pair, connected
from simulator.world import SlowCalls

from aiordma import AccessFlags, ConnectionOptions, LocalClosed, PeerClosed, VerbsError
from aiordma._native import fast_path
from aiordma.enums import SendFlags, WrOpcode
from aiordma.qp import NUMBER_MASK, send_queue
from aiordma.verbs import QueuePair

SIGNALED, FENCE = SendFlags.SIGNALED, SendFlags.FENCE
DEPTH = 4
SMALL = ConnectionOptions(send_depth=DEPTH, max_inline=16, max_message_size=1000)
RDMA = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


@asynccontextmanager
async def pair_of(
    simulation: Simulation, options: ConnectionOptions = SMALL, **more: Any
) -> AsyncIterator[tuple[Pair, End, Any]]:
    """Connect a pair: yield it, its near end, and a region of 100 bytes, which is released then."""
    async with connected(simulation, options, **more) as pair:
        region = await pair.near.connection.allocate(100, RDMA)
        yield pair, pair.near, region
        assert region.references.count == 0
        region.close()


async def fill(end: End) -> None:
    """Fill the send queue of an end, whose device executes nothing from now on."""
    end.hold()
    while end.sends.credits:
        await end.connection.send(b"x")


async def end_of(pair: Pair) -> None:
    """End the connection at the far side, and wait until the near side has noticed it."""
    pair.far.connection.abort()
    while not pair.near.connection.closed:
        await loops.sleep(0.001)


async def test_senders_wait_for_a_credit_in_order(simulation: Simulation) -> None:
    async with pair_of(simulation) as (pair, near, _):
        await near.complete()
        await fill(near)
        tasks = [await loops.start(near.connection.send(b"%d" % number)) for number in range(3)]
        assert (len(near.posts), near.sends.core.waiters) == (DEPTH, 3)
        assert near.connection.stats.messages_sent == DEPTH + simulation.near.is_iwarp
        await near.complete(1)
        assert [task.done() for task in tasks] == [True, False, False]
        await near.complete()
        received = [await pair.far.connection.recv() for _ in range(DEPTH + 3)]
        assert received == [b"x"] * DEPTH + [b"0", b"1", b"2"]
        assert (near.sends.credits, near.sends.core.waiters) == (DEPTH, 0)
        assert near.connection.stats.send_waits == 3


@pytest.mark.parametrize("how", ["cancelled", "closed here", "closed by the peer"])
@pytest.mark.parametrize("registers", [False, True])
async def test_senders_that_wait_for_a_credit_or_a_buffer_can_end(
    simulation: Simulation, how: str, registers: bool
) -> None:
    async with pair_of(simulation) as (pair, near, region):
        sources: list[Any] = [bytes(100), [region, b"copy"]]
        if registers:
            simulation.world.schedule = SlowCalls(ibv_reg_mr_iova2=1.0)
        else:
            await near.connection.send(bytes(100))
            await near.complete()
            await fill(near)
            sources += [b"x", region[:1], region]
        tasks = [await loops.start(near.connection.send(data)) for data in sources]
        await loops.sleep(0.01)
        sent = near.connection.stats.messages_sent
        if how == "cancelled":
            last = tasks.pop()
            await loops.cancel(*tasks)
            await near.complete()
            await last
            await loops.sleep(2)
            assert (near.sends.credits, near.pool_is_whole) == (DEPTH, True)
            assert (near.sends.core.waiters, near.connection.stats.messages_sent) == (0, sent + 1)
            return
        error = LocalClosed if how == "closed here" else PeerClosed
        if error is LocalClosed:
            near.connection.abort()
        else:
            await end_of(pair)
        tasks += [await loops.start(near.connection.send(data)) for data in sources]
        for task in tasks:
            with pytest.raises(error):
                await task
        await loops.sleep(2)
        assert near.connection.stats.messages_sent == sent


async def test_numbers_wrap_below_the_bit_of_receives(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*arguments: Any) -> fast_path.SendQueueCore:
        return fast_path.SendQueueCore(*arguments, NUMBER_MASK - 1)  # type: ignore[call-arg]

    monkeypatch.setattr(send_queue, "fast_path", SimpleNamespace(SendQueueCore=make))
    async with pair_of(simulation) as (pair, near, region):
        await near.complete()
        core = near.sends.core
        for number in range(3 * DEPTH):
            data = bytes(number) if number % 2 else region[:number]
            await near.connection.send(data)
            assert len(await pair.far.connection.recv()) == number
        await near.connection.send(bytes(100))
        await near.complete()
        assert (len(near.sends), near.sends.credits, near.pool_is_whole) == (0, DEPTH, True)
        assert core.count_in_flight == 0
        assert core.next_number < NUMBER_MASK // 2


@pytest.mark.parametrize("is_iwarp", [False, True])
@pytest.mark.parametrize(("depth", "every"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 16)])
def test_one_inline_message_per_interval_is_signaled(
    time_limit: None, is_iwarp: bool, depth: int, every: int
) -> None:
    """On iWARP each message is signaled."""

    async def body() -> None:
        options = ConnectionOptions(send_depth=depth, recv_depth=64)
        async with connected(simulation, options, options) as pair:
            await pair.near.complete()
            pair.near.forget_posts()
            await fill(pair.near)
            signaled = [is_iwarp or not (number + 1) % every for number in range(depth)]
            assert pair.near.flags == [SIGNALED * is_one for is_one in signaled]
            await pair.near.complete()
            assert (len(pair.near.sends), pair.near.sends.credits) == (0, depth)

    simulation = Simulation(iwarp=is_iwarp)
    simulation.run(lambda: loops.in_nursery(body))


@pytest.mark.transport("IB")
async def test_closing_signals_and_awaits_the_newest_requests(simulation: Simulation) -> None:
    options = ConnectionOptions(send_depth=10, max_inline=16)
    async with pair_of(simulation, options) as (pair, near, _):
        for nbytes in (1, 100):
            await near.connection.send(bytes(nbytes))
        await fill(near)  # the interval starts again after a signaled request
        assert near.flags == [0, SIGNALED, *[0, SIGNALED] * 4]
        near.sends.signal_tail()  # the newest request is signaled
        await near.complete()
        near.hold()
        for _ in range(3):
            await near.connection.send(b"tail")
        closing = await loops.start(near.connection.aclose())
        tail = near.posts[-1]
        assert (tail.opcode, tail.num_sge, tail.flags) == (WrOpcode.RDMA_WRITE, 0, SIGNALED)
        near.sends.signal_tail()  # once is enough
        assert (near.posts[-1], len(near.sends)) == (tail, 4)
        await near.complete()
        await closing
        assert [len(await pair.far.connection.recv()) for _ in range(13)][-4:] == [1, 4, 4, 4]


@pytest.mark.transport("IB")
async def test_a_refused_signal_of_the_tail_ends_the_closing(simulation: Simulation) -> None:
    async with pair_of(simulation, ConnectionOptions(send_depth=16)) as (_, near, _):
        await near.connection.send(b"x")
        near.refuse(errno.EINVAL)
        began = simulation.world.now
        await near.connection.aclose()
        assert simulation.world.now - began < 1
        assert simulation.world.calls.counts["rdma_disconnect"]


async def test_messages_are_sent_inline_or_copied_up_to_a_limit(simulation: Simulation) -> None:
    async with pair_of(simulation) as (pair, near, region):
        near.hold()
        for nbytes, is_inline in ((0, True), (16, True), (17, False)):
            await near.connection.send(bytearray(range(nbytes)))
            assert bool(near.posts[-1].flags & SendFlags.INLINE) is is_inline
            assert near.pool_is_whole is is_inline
        await near.complete()
        assert near.pool_is_whole
        assert [len(await pair.far.connection.recv()) for _ in range(3)] == [0, 16, 17]
        sent = near.connection.stats.messages_sent
        large, other = await near.connection.allocate(1001), await pair.far.connection.allocate(100)
        closed = await near.connection.allocate(1)
        closed.close()
        unusable: list[tuple[Any, str]] = [
            (bytes(1001), "a message of 1001 bytes; max_message_size is 1000"),
            ([region, bytes(901)], "1001 bytes do not fit into a max_message_size"),
            (large, "1001 bytes do not fit into a max_message_size"),
            (other, "registered on another device"),
            ([b"copy", other], "registered on another device"),
            (closed, "closed"),
        ]
        for data, why in unusable:
            with pytest.raises(ValueError, match=why):
                await near.connection.send(data)
        large.close()
        other.close()
        assert near.connection.stats.messages_sent == sent


@pytest.mark.parametrize("kind", ["inline", "bytearray", "copied", "registered"])
async def test_a_refused_message_ends_the_connection(simulation: Simulation, kind: str) -> None:
    """A refused request is treated as posted: the device can still read its buffer."""
    async with pair_of(simulation) as (_, near, region):
        for _ in range(DEPTH):
            await near.connection.send(bytes(100))
        await near.complete()
        data: Any = {"inline": b"x", "copied": bytes(100), "registered": [region[:9], region[9:]]}
        data["bytearray"] = bytearray(1)
        near.refuse(errno.EINVAL)
        for _ in range(2):
            with pytest.raises(VerbsError, match="ibv_post_send") as caught:
                await near.connection.send(data[kind])
            assert caught.value.errno == errno.EINVAL
            near.refuse(0)  # from now on the device would accept it
        assert near.connection.stats.messages_sent == DEPTH + simulation.near.is_iwarp
        assert (len(near.sends), near.pool_is_whole) == (0, kind != "copied")
        assert region.references.count == 2 * (kind == "registered")
        await near.connection.aclose()


async def test_a_refusal_on_iwarp_can_mean_that_the_peer_has_gone(simulation: Simulation) -> None:
    async with pair_of(simulation) as (_, near, _):
        assert repr(near.connection).endswith("open>")
        near.refuse(errno.ENOTCONN)
        with pytest.raises(PeerClosed if simulation.near.is_iwarp else VerbsError):
            await near.connection.send(b"x")
        assert repr(near.connection).endswith("closed>")


async def test_after_a_failed_registration_the_connection_goes_on(simulation: Simulation) -> None:
    async with pair_of(simulation) as (pair, near, _):
        for data in (bytes(100), [b"x" * 50, b"y" * 50]):
            simulation.world.calls.fail("ibv_reg_mr_iova2", errno.ENOMEM)
            with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
                await near.connection.send(data)
        assert near.sends.credits >= DEPTH - 1
        await near.connection.send(b"x" * 100)
        assert await pair.far.connection.recv() == b"x" * 100


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_destroyed", [False, True])
async def test_requests_of_a_device_that_flushes_nothing_end_with_the_queue_pair(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_destroyed: bool
) -> None:
    """The waiting tasks go on, but the memory is kept: the device might still use it."""
    options = ConnectionOptions(send_depth=DEPTH, initiator_depth=1)
    async with pair_of(simulation, options) as (pair, near, region):
        remote = (await pair.far.connection.allocate(100, RDMA)).remote
        near.hold()
        sources: list[Any] = [region, [region, b"copy"]]
        calls: list[Any] = [near.connection.send(data) for data in sources]
        calls += [near.connection.read(remote, into) for into in (region, region, [region])]
        tasks = [await loops.start(call) for call in calls]
        await loops.sleep(0.01)
        monkeypatch.setattr(simulation.network, "_flush", lambda qp: None)
        await end_of(pair)
        await loops.sleep(1)
        assert [task.done() for task in tasks[:3]] == [False] * 3
        if is_destroyed:
            await near.connection.aclose()
        for task in tasks:
            with pytest.raises((PeerClosed, LocalClosed) if is_destroyed else PeerClosed):
                await task
        assert region.references.count == (0 if is_destroyed else 3)
        await near.connection.aclose()


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_posted", [False, True])
async def test_a_ctrl_c_while_posting_keeps_the_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    async with pair_of(simulation) as (pair, near, region):
        post_list = QueuePair.post_list

        def interrupted(qp: QueuePair, *arguments: Any, **more: Any) -> None:
            if is_posted:
                post_list(qp, *arguments, **more)
            raise CtrlC

        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "post_list", interrupted)
            with pytest.raises(CtrlC):
                await near.connection.send([region[:10], region[50:]])
        assert region.references.count == 2  # it is not known if the request was posted
        await near.connection.send(b"x")
        await near.complete()
        assert (region.references.count, near.sends.credits) == (0, DEPTH)
        received = [await pair.far.connection.recv() for _ in range(1 + is_posted)]
        assert [len(message) for message in received] == ([60] if is_posted else []) + [1]


@pytest.mark.transport("IB")
@pytest.mark.parametrize("how", ["before", "committed", "posted"])
@pytest.mark.parametrize("size", [10, 900])
async def test_a_ctrl_c_while_posting_keeps_the_buffer_and_the_credit(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, size: int, how: str
) -> None:
    """Of a request that is, or might be, posted. A small message is inline, and has no buffer."""
    name = "post_send_inline" if size == 10 else "post_send_copy"
    async with pair_of(simulation) as (pair, near, _):
        post = getattr(QueuePair, name)

        def interrupted(*arguments: Any, **more: Any) -> None:
            if how == "posted":
                post(*arguments, **more)
            raise CtrlC

        await near.complete()
        near.hold()
        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, name, interrupted)
            if how == "before":
                patch.setattr(near.sends, name.replace("_send", ""), interrupted)
            with pytest.raises(CtrlC):
                await near.data_path.slow.sender.send(bytes(size))
        is_committed = how != "before"
        assert near.sends.credits == DEPTH - is_committed
        assert near.sends.core.count_in_flight == (is_committed and size != 10)
        await near.connection.send(bytes(900))  # it is signaled
        near.sends.signal_tail()
        await near.complete()
        assert (near.sends.credits, near.sends.core.count_in_flight) == (DEPTH, 0)
        received = [await pair.far.connection.recv() for _ in range(1 + (how == "posted"))]
        assert [len(message) for message in received] == [size] * (how == "posted") + [900]


@pytest.mark.loops("asyncio")  # small messages take the fast path
async def test_a_fence_lasts_until_all_cancelled_reads_have_ended(simulation: Simulation) -> None:
    async with pair_of(simulation, ConnectionOptions(max_inline=16)) as (pair, near, region):
        source = await pair.far.connection.allocate(100, RDMA)
        connection, remote = near.connection, source.remote
        await connection.send(bytes(100))
        near.hold()
        reads = [await loops.start(connection.read(remote, region)) for _ in range(3)]
        await loops.cancel(reads[0], reads[2])
        begin = len(near.posts)
        for data in (b"x", bytes(100)):
            await connection.send(data)
        writes = [await loops.start(connection.write(data, remote)) for data in (b"x", region)]
        reads.append(await loops.start(connection.read(remote, region)))
        assert [FENCE in flags for flags in near.flags[begin:]] == [True] * 4 + [False]
        await near.complete(2)
        await connection.send(b"still fenced")
        assert FENCE in near.flags[-1]
        await near.complete()
        await connection.send(b"not fenced")
        assert FENCE not in near.flags[-1]
        await loops.gather(reads[1], reads[3], *writes)
        for into in (region, [region[:10], region[50:90]]):
            near.hold()
            task = await loops.start(connection.read(remote[:50], into))
            near.execute()
            task.cancel()  # the read has ended before
            await loops.wait([task])
            await loops.sleep(0.01)
            await connection.send(b"x")
            assert FENCE not in near.flags[-1]
        source.close()


async def test_memory_is_not_kept_if_the_key_to_invalidate_is_none(simulation: Simulation) -> None:
    async with pair_of(simulation) as (_, near, region):
        wrong: Any = object()
        with pytest.raises(AttributeError):
            await near.connection.send(region, invalidate=wrong)
        assert region.references.count == 0
