"""Byte streams between two simulated devices."""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import loops
import pytest
import trio
from attempts import refuse
from simulator import Simulation
from simulator.pairs import CtrlC
from streaming import streaming

from aiordma import (
    AccessFlags,
    BusyError,
    ByteStream,
    LocalClosed,
    StreamOptions,
    StreamStats,
    VerbsError,
)
from aiordma.loop.time_budget import LoopTimeBudget
from aiordma.verbs import QueuePair

OPTIONS = StreamOptions(mappings=2, adaptive_poll=False)  # polling reads the real clock
REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


@asynccontextmanager
async def connected(
    simulation: Simulation, options: StreamOptions = OPTIONS
) -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    """Connect two ends with these options, by default with two mappings each.

    Abort both after the block.
    """
    address: Any = simulation.far
    async with streaming(address, options, options) as pair:
        near, far = pair.client, pair.server
        await pair.listener.aclose()
        assert near.local_address == far.peer_address
        await near.wait_sendable()
        await near.send(b"first")  # an accepted iWARP connection sends nothing before
        assert await far.receive() == b"first"
        yield near, far


async def test_a_limit_that_is_longer_than_a_number_of_c(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        receiving = await loops.start(far.receive(1 << 70))
        await near.send(b"hello")
        assert await receiving == b"hello"
        for limit in (0, -1, -(1 << 70)):
            with pytest.raises(ValueError, match="not at least 1"):
                await far.receive(limit)


def allow_polling(stream: ByteStream, nanoseconds: int) -> None:
    """Let the task poll for this time before the loop has to run."""
    dispatcher = stream._core.data_path.dispatcher
    dispatcher.budget_start, dispatcher.budget = time.monotonic_ns(), nanoseconds


Calls = dict[str, Callable[[], Awaitable[Any]]]


async def sending_calls(near: ByteStream, far: ByteStream) -> Calls:
    """Return the calls of `near` that post something. `far` has mapped memory for iowrite()."""
    await far.iomap(await far.allocate(100, REMOTE), 0)
    await far.send(b"mapped")
    assert await near.receive() == b"mapped"
    memory = await near.allocate(100, REMOTE)
    return {
        "inline": lambda: near.send(b"x"),
        "copied": lambda: near.send(bytes(1000)),
        "registered": lambda: near.send(memory),
        "iomap": lambda: near.iomap(memory, 0),
        "iowrite": lambda: near.iowrite(bytes(100), 0),
    }


@pytest.mark.parametrize("name", ["receive", "send", "registered"])
async def test_aborting_a_stream_ends_a_call_that_waits(simulation: Simulation, name: str) -> None:
    async with connected(simulation) as (near, far):
        calls: Calls = {
            "receive": near.receive,
            "send": lambda: near.send(bytes(1 << 24)),
            "registered": (await sending_calls(near, far))["registered"],
        }
        for qp in simulation.queue_pairs():
            qp.allowed = 0 if name == "registered" else None  # nothing completes
        waiting = loops.create_task(calls[name]())
        await loops.sleep(10.0)  # in virtual time: the buffers are full by then
        assert not waiting.done()
        if name == "send":
            for second in (near.send_eof, near.wait_sendable):
                with pytest.raises(BusyError):
                    await second()
        near.abort()
        with pytest.raises(LocalClosed):
            await loops.wait_for(waiting, 60.0)


async def test_the_numbers_of_a_stream(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        assert near.stats == StreamStats(bytes_sent=5, receive_waits=0, sends_posted=1)
        waits = far.stats.receive_waits
        receiving = loops.create_task(far.receive())
        await loops.until(lambda: far.stats.receive_waits > waits, "the wait for bytes")
        await near.send(b"1234567")
        assert await receiving == b"1234567"
        await near.send(b"89")
        await loops.until(lambda: far.stats.bytes_unread == 2, "the bytes")
        assert far.stats.bytes_received == near.stats.bytes_sent == 14
        assert await far.receive() == b"89"
        assert far.stats.bytes_unread == 0
        await far.iomap(await far.allocate(100, REMOTE), 0)
        await far.send(b"mapped")
        await near.receive()
        await near.iowrite(bytes(100), 0)
        assert (near.stats.bytes_written, near.stats.bytes_sent) == (100, 14)
        sending = loops.create_task(near.send(bytes(1 << 20)))
        await loops.until(lambda: near.stats.send_waits > 0, "the peer's buffer to be full")
        await loops.cancel(sending)
        for qp in simulation.queue_pairs():
            qp.allowed = 0  # nothing completes
        await far.send(b"more")
        assert far.stats.sends_posted > 0
    assert near.stats.bytes_received == 6


@pytest.mark.parametrize(
    ("send_buffer", "nbytes", "messages"),
    [(1 << 18, 3 << 16, 3), (1 << 19, 3 << 17, 3), (1 << 20, 3 << 18, 3), (1 << 22, 3 << 18, 3)],
)
async def test_a_message_has_a_quarter_of_the_send_buffer_within_limits(
    simulation: Simulation, send_buffer: int, nbytes: int, messages: int
) -> None:
    """The limits are 64 KiB and 256 KiB."""
    options = replace(OPTIONS, send_buffer=send_buffer, recv_buffer=1 << 22)
    async with connected(simulation, options) as (near, far):
        before = far._core.data_path.messages_received
        await near.send(bytes(nbytes + 1))
        await loops.until(lambda: far.stats.bytes_unread == nbytes + 1, "the bytes")
        assert far._core.data_path.messages_received - before == messages + 1


async def test_copied_data_is_signaled_when_a_quarter_of_the_ring_is_used(
    simulation: Simulation,
) -> None:
    """Each completion is an event for the sender's loop. iWARP reports each request by itself."""
    async with connected(simulation) as (near, far):
        core = near._core.data_path.sends.core
        unsignaled = []
        for _ in range(6):  # they fit into half of the peer's buffer
            await near.send(bytes(20_000))
            unsignaled.append(core.unsignaled)
            await loops.until(lambda: far.stats.bytes_unread >= 20_000, "the bytes")
            await far.receive(20_000)
        # Before them is the "first" message, which is inline.
        expected = [2, 3, 4, 0, 1, 2] if not simulation.near.is_iwarp else [0] * 6
        assert unsignaled == expected


@pytest.mark.parametrize("budget", [10**18, 0], ids=["polls", "yields, then polls"])
async def test_a_sender_polls_for_room_before_it_waits(
    simulation: Simulation, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for all bytes until completions are taken, which have arrived already."""
    yield_to_loop = LoopTimeBudget.yield_to_loop

    async def yield_and_allow(loop_budget: LoopTimeBudget) -> None:
        await yield_to_loop(loop_budget)
        allow_polling(near, 10**18)  # the budget is real time

    monkeypatch.setattr(LoopTimeBudget, "yield_to_loop", yield_and_allow)
    async with connected(simulation) as (near, far):
        nbytes = 3 * StreamOptions().send_buffer // 4
        await near.send(bytes(nbytes))
        simulation.world.settle(0.1)
        allow_polling(far, 10**18)
        assert far._core.data_path.core.read(nbytes) == bytes(nbytes)
        simulation.world.settle(0.1)
        allow_polling(near, budget)
        waits = near.stats.send_waits
        await near.send(bytes(nbytes // 2))
        assert near.stats.send_waits == waits


async def test_a_receiver_lets_the_loop_run_and_polls_again(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        core = far._core.data_path.core
        await near.send(b"hello")
        simulation.world.settle(0.1)  # it has arrived, and no poll has taken it
        core.poll_budget, waits = 10**18, far.stats.receive_waits
        core.set_slow(refuse, refuse)
        allow_polling(far, 0)
        assert await far.receive() == b"hello"
        assert far.stats.receive_waits == waits


@pytest.mark.parametrize("has_bytes", [True, False])
async def test_only_bytes_for_a_reader_between_two_polls_end_polling(
    simulation: Simulation, has_bytes: bool
) -> None:
    """Completions of its sends do not: the reader does not wait for those."""
    async with (
        connected(simulation) as (_, polling),
        connected(simulation) as (sender, reader),
    ):
        core = polling._core.data_path.core
        core.poll_budget = 1
        allow_polling(polling, 10**18)
        for _ in range(2):  # the first poll takes what was sent while the streams connected
            simulation.world.settle(0.1)
            assert core.read(1) is None
            await (sender if has_bytes else reader).send(bytes(80_000))
        reader._core.data_path.core.has_reader = True
        allow_polling(polling, 10**18)
        simulation.world.settle(0.1)
        sends = reader._core.data_path.sends.core
        oldest = sends.oldest_pending
        assert core.read(1) is None
        assert core.preempted == has_bytes
        assert has_bytes or sends.oldest_pending > oldest


@pytest.mark.parametrize("name", ["inline", "copied", "registered", "iomap", "iowrite"])
async def test_a_send_that_is_refused_ends_the_stream(simulation: Simulation, name: str) -> None:
    async with connected(simulation) as (near, far):
        calls = await sending_calls(near, far)
        for qp in simulation.queue_pairs():
            qp.pointer.sends.refusal = errno.EINVAL
        for _ in range(2):
            with pytest.raises(VerbsError, match="ibv_post_send"):
                await calls[name]()
        assert near.closed


@pytest.mark.parametrize("is_posted", [False, True])
async def test_a_ctrl_c_while_posting_releases_nothing_twice(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    async with connected(simulation) as (near, far):
        sends, core = near._core.data_path.sends, near._core
        name = "post_send_inline" if core.data_path.is_iwarp else "post_write_inline"
        post, credits = getattr(QueuePair, name), sends.credits

        def interrupted(*arguments: Any, **more: Any) -> None:
            if is_posted:
                post(*arguments, **more)
            raise CtrlC

        for qp in simulation.queue_pairs():
            qp.allowed = 0
        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, name, interrupted)
            with pytest.raises(CtrlC):
                core.finish()
        assert (sends.credits, len(sends.core.in_flight()), sends._kept) == (credits - 1, 1, [])
        for qp in simulation.queue_pairs():
            qp.allowed = None
        if is_posted:
            assert await far.receive() == b""
            await loops.sleep(1)
            assert core.data_path.protocol.all_controls_completed
            assert sends.credits == OPTIONS.send_depth


async def test_a_mapping_with_an_impossible_offset_takes_nothing(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        region = await near.allocate(100, REMOTE)
        credits = near._core.data_path.protocol.outbound.credits
        for offset in (-1, 1 << 64, (1 << 64) - 100):
            with pytest.raises(ValueError, match="the offsets of a mapping are 0 to"):
                await near.iomap(region, offset)
        for wrong in ("0", 1.0):
            with pytest.raises(TypeError):
                await near.iomap(region, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await near.iowrite(b"x", wrong)  # type: ignore[arg-type]
        outbound = near._core.data_path.protocol.outbound
        assert (region.references.count, outbound.credits) == (0, credits)
        await near.iomap(region, (1 << 64) - 101)
        await near.send(b"mapped")
        assert await far.receive() == b"mapped"
        for offset in (-1, 0, 1 << 64):
            with pytest.raises(ValueError, match="the peer has not mapped"):
                await far.iowrite(b"x", offset)
        await far.iowrite(b"written", (1 << 64) - 101)
        await far.send(b"after it")
        assert await near.receive() == b"after it"
        assert bytes(memoryview(region)[:8]) == b"written\0"


async def test_closing_takes_no_longer_than_close_timeout(simulation: Simulation) -> None:
    async with connected(simulation) as (near, _):
        for qp in simulation.queue_pairs():
            qp.allowed = 0  # neither the data nor DISCONNECT completes
        await near.send(b"stuck")
        began = loops.now()
        await near.aclose()
        assert loops.now() - began < StreamOptions().close_timeout + 0.1


@pytest.mark.parametrize("queue", ["sends", "receive_queue"])
async def test_a_refusal_while_receiving_ends_a_stream(simulation: Simulation, queue: str) -> None:
    """The stream posts each receive again, and an update after many of them."""
    async with connected(simulation) as (near, far):
        for qp in simulation.queue_pairs():
            if qp.number == far._endpoint.cm.handle.qp.number:  # type: ignore[union-attr]
                getattr(qp.pointer, queue).refusal = errno.EINVAL
        sending = loops.create_task(near.send(bytes(1 << 20)))
        with pytest.raises(VerbsError, match="ibv_post"):
            _ = [part async for part in far]
        sending.cancel()


@pytest.mark.loops("trio")
async def test_a_call_that_was_cancelled_before_sends_nothing(simulation: Simulation) -> None:
    async with connected(simulation) as (near, far):
        calls = await sending_calls(near, far)
        for call in (*calls.values(), near.wait_sendable, near.send_eof, near.receive):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            assert scope.cancelled_caught
        await near.send(b"after")
        assert await far.receive() == b"after"
