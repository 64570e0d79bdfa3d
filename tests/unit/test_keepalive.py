"""Peers whose machine does not answer any more, and the checks that detect it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import loops
import pytest
from helpers import SHARED
from simulator import Simulation
from simulator.network import RETRY_SECONDS, RequestFailed
from simulator.verbs import QueuePair
from simulator.world import Failure, lib
from streaming import streaming

import aiordma
from aiordma import (
    ByteStream,
    Connection,
    ConnectionOptions,
    PeerTimeout,
    StreamOptions,
    VerbsError,
    WorkRequestError,
)
from aiordma.asyncio.errors import as_os_error
from aiordma.enums import WcOpcode
from aiordma.qp.keepalive import SLOWEST_RATE
from aiordma.qp.retries import RXE_MAX_RETRIES
from aiordma.verbs.device import RXE_VENDOR_ID, SIW_VENDOR_ID

PORT = 7471
FAR = "10.0.0.2"
KEEPALIVE = 2.0
TIMEOUT = 3.0
WATCHED = ConnectionOptions(keepalive=KEEPALIVE, peer_timeout=TIMEOUT)
UNWATCHED = ConnectionOptions(peer_timeout=TIMEOUT)

# Seconds of the simulated network, which are more than its messages need.
SOON = 0.1


@asynccontextmanager
async def connected(
    simulation: Simulation, options: ConnectionOptions
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends. Only the first one has the options."""
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect(FAR, PORT, options=options)
        far = await accepting
        await near.send(b"first")
        await far.send(b"answer")
        assert (await far.recv(), await near.recv()) == (b"first", b"answer")
        yield near, far
        for end in (near, far):
            end.abort()
            await end.aclose()


@asynccontextmanager
async def connected_streams(
    simulation: Simulation, options: StreamOptions
) -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    """Connect two ends of a stream. Only the first one has the options."""
    async with streaming(simulation.far, options) as pair:
        await check_echo(pair.client, pair.server)
        yield pair.client, pair.server


def switch_off(simulation: Simulation) -> None:
    """Let no request be acknowledged any more. Neither side is notified."""
    simulation.network.is_cut = True


def longest(simulation: Simulation) -> float:
    """Return the seconds in which a check must detect that the peer is off."""
    return TIMEOUT + SOON if simulation.near.is_iwarp else RETRY_SECONDS + SOON


# --- idle connections ---


async def test_keepalive_ends_a_wait_when_the_peer_is_off(simulation: Simulation) -> None:
    async with connected(simulation, WATCHED) as (near, _):
        began = loops.now()
        switch_off(simulation)
        with pytest.raises(PeerTimeout) as caught:
            await near.recv()
        assert loops.now() - began <= 2 * KEEPALIVE + longest(simulation)
        expected = "has not answered for 3 s" if simulation.near.is_iwarp else "RETRY_EXC_ERR"
        assert expected in str(caught.value)
        assert isinstance(as_os_error(caught.value), TimeoutError)
        with pytest.raises(PeerTimeout):
            await near.send(b"x")
        began = loops.now()
        await near.aclose()  # it does not wait for the peer
        assert loops.now() - began < 1


async def test_keepalive_leaves_a_connection_whose_peer_answers(simulation: Simulation) -> None:
    async with connected(simulation, WATCHED) as (near, far):
        before = far.stats.messages_received
        await loops.sleep(20 * KEEPALIVE)
        assert not near.closed
        assert far.stats.messages_received == before
        await near.send(b"still there")
        assert await far.recv() == b"still there"


async def test_an_idle_connection_without_keepalive_posts_nothing(simulation: Simulation) -> None:
    async with connected(simulation, UNWATCHED) as (near, _):
        await loops.sleep(10 * TIMEOUT)  # on iWARP one check confirms the last message
        posted = near._endpoint.data_path.sends.posted
        await loops.sleep(100 * TIMEOUT)
        assert near._endpoint.data_path.sends.posted == posted


# --- connections that send ---


@pytest.mark.parametrize("idle_before", [0.0, 10 * TIMEOUT])
async def test_a_send_to_a_peer_that_is_off_ends_the_connection(
    simulation: Simulation, idle_before: float
) -> None:
    """The send follows a message of the peer, immediately or later."""
    async with connected(simulation, UNWATCHED) as (near, _):
        await loops.sleep(idle_before)
        began = loops.now()
        switch_off(simulation)
        await near.send(b"unanswered")
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= TIMEOUT + longest(simulation)


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("keepalive", [0.0, 60.0])
async def test_a_send_just_after_a_message_is_unanswered_for_at_most_two_checks(
    simulation: Simulation, keepalive: float
) -> None:
    """The longest time: the peer was alive just after a check, and the send followed then."""
    options = ConnectionOptions(keepalive=keepalive, peer_timeout=TIMEOUT)
    async with connected(simulation, options) as (near, far):
        await next_check(near)
        await far.send(b"question")
        assert await near.recv() == b"question"
        began = loops.now()
        await near.send(b"answer")
        switch_off(simulation)
        sending = loops.create_task(send_often(near))
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= 5 / 3 * TIMEOUT + SOON
        await sending


async def next_check(end: Connection) -> None:
    """Wait until the keepalive has just made a check."""
    keepalive = end._endpoint._keepalive
    assert keepalive is not None
    timer = keepalive._timer
    while keepalive._timer is timer:
        await loops.sleep(0.01)


async def send_often(end: Connection) -> None:
    """Send until the connection ends. On iWARP each send completes, as TCP takes it."""
    with contextlib.suppress(PeerTimeout):
        while True:
            await end.send(b"more")
            await loops.sleep(TIMEOUT / 7)


@pytest.mark.transport("IWARP")
async def test_a_request_that_tcp_does_not_take_ends_the_connection(
    simulation: Simulation,
) -> None:
    """The send queue is full, so that no probe can be posted."""
    options = ConnectionOptions(peer_timeout=TIMEOUT, send_depth=4)
    async with connected(simulation, options) as (near, _):
        began = loops.now()
        switch_off(simulation)
        for qp in simulation.queue_pairs():
            qp.allowed = 0
        for _ in range(4):
            await near.send(b"x")
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= 2 * TIMEOUT + SOON


# --- connections that are slow, but healthy ---

# Registered memory, of which one transfer takes 8 s at the slowest rate.
LARGE = 8 * SLOWEST_RATE


@pytest.mark.transport("IWARP")  # on RoCE the device repeats
async def test_a_probe_behind_slow_requests_is_given_more_time(simulation: Simulation) -> None:
    async with connected(simulation, WATCHED) as (near, far):
        region = await far.allocate(8, SHARED)
        into = await near.allocate(LARGE, SHARED)
        simulation.network.read_delay = 3 * TIMEOUT  # the probe is a read, too
        reading = [loops.create_task(near.read(region.remote, into[:8])) for _ in range(2)]
        for task in reading:
            await task
        simulation.network.read_delay = 0
        await loops.sleep(4 * TIMEOUT)
        assert not near.closed
        switch_off(simulation)
        began = loops.now()
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= KEEPALIVE + 8 + 2 * TIMEOUT
        region.close()
        into.close()


@pytest.mark.transport("IWARP")
async def test_a_probe_waits_for_slow_writes_before_it(simulation: Simulation) -> None:
    """Each write takes a while, and all of them much longer than the time for an answer."""
    async with connected(simulation, WATCHED) as (near, _):
        memory = await near.allocate(LARGE, SHARED)
        (qp,) = [one for one in simulation.queue_pairs() if one.device is simulation.near]
        qp.allowed = 0
        writing = [loops.create_task(near.write(b"", memory.remote[:0])) for _ in range(8)]
        for _ in writing:
            await loops.sleep(3 * TIMEOUT)
            qp.allowed = 1
        await loops.sleep(3 * TIMEOUT)
        assert not near.closed
        qp.allowed = None
        for task in writing:
            await task
        await loops.sleep(10 * TIMEOUT)
        assert not near.closed
        memory.close()


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("depth", [1, 16])
async def test_reads_that_use_all_credits_stand_for_a_probe(
    simulation: Simulation, depth: int
) -> None:
    options = ConnectionOptions(peer_timeout=TIMEOUT, initiator_depth=depth)
    async with connected(simulation, options) as (near, far):
        region = await far.allocate(8, SHARED)
        into = await near.allocate(8, SHARED)
        simulation.network.read_delay = 0.8 * TIMEOUT
        end = loops.now() + 8 * TIMEOUT

        async def read_on() -> None:
            while loops.now() < end:
                await near.read(region.remote, into)

        await loops.gather(*[read_on() for _ in range(depth + 8)])
        simulation.network.read_delay = 0
        await loops.sleep(20 * TIMEOUT)
        assert not near.closed
        simulation.network.read_delay = 1e9
        switch_off(simulation)
        began = loops.now()
        reading = [loops.create_task(near.read(region.remote, into)) for _ in range(depth)]
        sending = loops.create_task(send_often(near))
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= 5 / 3 * TIMEOUT + SOON
        for task in reading:
            with pytest.raises(PeerTimeout):
                await task
        await sending
        region.close()
        into.close()


@pytest.mark.transport("IWARP")
async def test_writers_that_use_all_credits_do_not_end_the_connection(
    simulation: Simulation,
) -> None:
    async with connected(simulation, UNWATCHED) as (near, far):
        source = await near.allocate(8)
        target = await far.allocate(8, SHARED)
        end = loops.now() + 4 * TIMEOUT

        async def write_on() -> None:
            while loops.now() < end:
                await near.write(source, target.remote)

        with mock.patch.object(simulation.world.schedule, "gap", return_value=0.01):
            await loops.gather(*[write_on() for _ in range(80)])
        await loops.sleep(20 * TIMEOUT)
        assert not near.closed
        source.close()
        target.close()


@pytest.mark.transport("IWARP")
async def test_sends_that_are_held_back_at_the_beginning_are_not_missed(
    simulation: Simulation,
) -> None:
    """siw waits 0.5 s for a first message. Until then no probe can be posted."""
    simulation.far.vendor_id = SIW_VENDOR_ID
    quick = ConnectionOptions(keepalive=0.05, peer_timeout=0.1)
    async with aiordma.listen(FAR, PORT, options=quick) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect(FAR, PORT), await accepting as far:
            await loops.sleep(2.0)
            assert not far.closed
            switch_off(simulation)
            began = loops.now()
            with pytest.raises(PeerTimeout):
                await far.recv()
            assert loops.now() - began <= 0.05 + 5 / 3 * 0.1 + SOON


async def test_a_loop_that_was_stalled_first_reads_what_has_arrived(
    simulation: Simulation,
) -> None:
    """Some loops run timers before they look at file descriptors, as libuv does."""
    async with connected(simulation, WATCHED) as (near, _):
        keepalive = near._endpoint._keepalive
        assert keepalive is not None
        for _ in range(20):
            loops.block(10 * TIMEOUT)
            assert keepalive._timer is not None
            keepalive._timer.expire()
        assert not near.closed
        assert keepalive._quiet_checks <= KEEPALIVE / keepalive._interval


# --- peers without reads ---


@pytest.mark.transport("IWARP")
async def test_keepalive_of_a_connection_whose_peer_allows_no_reads(
    simulation: Simulation,
) -> None:
    """Only TCP can notice the peer then. It needs data on its way, so that writes are posted."""
    without = ConnectionOptions(responder_resources=0)
    async with aiordma.listen(FAR, PORT, options=WATCHED) as listener:
        accepting = loops.create_task(listener.accept())
        async with (
            await aiordma.connect(FAR, PORT, options=without) as near,
            await accepting as far,
        ):
            await near.send(b"first")
            assert await far.recv() == b"first"
            posted = far._endpoint.data_path.sends.posted
            await loops.sleep(20 * KEEPALIVE)
            assert not far.closed
            assert far._endpoint.data_path.sends.posted - posted in (9, 10)
            await far.send(b"still there")
            assert await near.recv() == b"still there"


@pytest.mark.transport("IWARP")
async def test_keepalive_of_a_stream_whose_peer_allows_no_reads(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the connection. Other rsocket programs might allow none."""
    options_of = StreamOptions.connection_options

    def without_reads(self: StreamOptions) -> ConnectionOptions:
        return replace(options_of(self), responder_resources=0)

    monkeypatch.setattr(StreamOptions, "connection_options", without_reads)
    watched = StreamOptions(keepalive=KEEPALIVE, peer_timeout=TIMEOUT)
    async with streaming(simulation.far, server=watched) as pair:
        near, far = pair.client, pair.server
        await check_echo(near, far)
        posted = far._core.data_path.sends.posted
        await loops.sleep(20 * KEEPALIVE)
        assert far._core.data_path.sends.posted - posted in (9, 10)
        await check_echo(near, far)


@pytest.mark.parametrize("kind", [ByteStream, Connection])
async def test_the_error_of_a_probe_names_its_operation(
    simulation: Simulation, kind: type[ByteStream | Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux's siw can give a wrong answer to the read of no bytes."""
    watched = StreamOptions(keepalive=KEEPALIVE)
    messages, streams = connected(simulation, WATCHED), connected_streams(simulation, watched)
    async with messages if kind is Connection else streams as (near, _):
        failed = mock.Mock(side_effect=RequestFailed(lib.IBV_WC_GENERAL_ERR))
        monkeypatch.setattr(simulation.network, "_execute", failed)
        with pytest.raises(WorkRequestError, match="GENERAL_ERR") as caught:
            await (near.recv() if isinstance(near, Connection) else near.receive())
        assert failed.call_count == 1
        is_iwarp = simulation.near.is_iwarp
        assert caught.value.opcode is (WcOpcode.RDMA_READ if is_iwarp else WcOpcode.RDMA_WRITE)


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("allowed", [4, 0])
async def test_siw_reports_the_reads_that_the_peer_allows(
    simulation: Simulation, allowed: int
) -> None:
    """A read that the peer does not allow ends the connection. So none is posted as a probe."""
    simulation.near.vendor_id = SIW_VENDOR_ID
    limits = simulation.far.limits
    limits.max_qp_rd_atom = limits.max_qp_init_rd_atom = allowed
    async with connected(simulation, UNWATCHED) as (near, _):
        assert near._endpoint.data_path.slow.remote.initiator_depth == allowed
        posted = near._endpoint.data_path.sends.posted
        await loops.sleep(10 * TIMEOUT)
        assert not near.closed
        assert near._endpoint.data_path.sends.posted == posted + (allowed > 0)


@pytest.mark.transport("IWARP")
async def test_without_reads_nothing_can_be_checked_on_iwarp(simulation: Simulation) -> None:
    without = ConnectionOptions(initiator_depth=0, peer_timeout=TIMEOUT)
    async with connected(simulation, without) as (near, _):
        await near.send(b"unconfirmed")
        await loops.sleep(10 * TIMEOUT)
        assert not near.closed
    with pytest.raises(ValueError, match="keepalive needs an initiator_depth over 0"):
        await connected(simulation, ConnectionOptions(initiator_depth=0, keepalive=1)).__aenter__()


# --- byte streams ---


@pytest.mark.parametrize("sends", [False, True])
async def test_a_stream_ends_when_the_peer_is_off(simulation: Simulation, sends: bool) -> None:
    options = StreamOptions(keepalive=0 if sends else KEEPALIVE, peer_timeout=TIMEOUT)
    async with streaming(simulation.far, options) as pair:
        near, far = pair.client, pair.server
        await check_echo(near, far)
        await loops.sleep(20 * KEEPALIVE)
        await check_echo(near, far)
        switch_off(simulation)
        began = loops.now()
        if sends:
            await near.send(b"unanswered")
        with pytest.raises(PeerTimeout):
            await near.receive()
        assert loops.now() - began <= 2 * KEEPALIVE + TIMEOUT + longest(simulation)
        near.abort()
        far.abort()


@pytest.mark.parametrize("keepalive", [0.0, KEEPALIVE])
async def test_a_stream_that_is_slow_stays_open(simulation: Simulation, keepalive: float) -> None:
    """Its send queue is full for a long time, and a reply to a probe takes long, too."""
    options = StreamOptions(keepalive=keepalive, peer_timeout=TIMEOUT, send_depth=16)
    async with streaming(simulation.far, options) as pair:
        near, far = pair.client, pair.server
        simulation.network.read_delay = 0.9 * TIMEOUT
        with mock.patch.object(simulation.world.schedule, "gap", return_value=0.05):
            began = loops.now()
            while loops.now() - began < 10 * TIMEOUT:
                sending = loops.create_task(near.send(bytes(1 << 20)))
                left = 1 << 20
                while left:
                    left -= len(await far.receive(left))
                await sending
        simulation.network.read_delay = 0
        await loops.sleep(10 * TIMEOUT)
        await check_echo(near, far)
        near.abort()
        far.abort()


async def check_echo(near: ByteStream, far: ByteStream) -> None:
    await near.send(b"ping")
    assert await far.receive() == b"ping"
    await far.send(b"pong")
    assert await near.receive() == b"pong"


# --- soft-RoCE, which takes a retry count of 7 for ever ---


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_rxe", [True, False])
async def test_the_retries_are_finite_on_both_sides(simulation: Simulation, is_rxe: bool) -> None:
    for device in (simulation.near, simulation.far):
        device.vendor_id = RXE_VENDOR_ID * is_rxe
    async with connected(simulation, ConnectionOptions(retry_count=7)):
        expected = RXE_MAX_RETRIES if is_rxe else 7
        assert [qp.retry_count for qp in simulation.world.all(QueuePair)] == [expected] * 2


@pytest.mark.transport("IB")
async def test_an_accepted_connection_limits_the_retries_of_its_peer(
    simulation: Simulation,
) -> None:
    """The devices differ, so that the peer asks for more retries than end on this device."""
    simulation.far.vendor_id = RXE_VENDOR_ID
    async with connected(simulation, ConnectionOptions(retry_count=7)):
        qps = list(simulation.world.all(QueuePair))
        assert {qp.retry_count for qp in qps} == {7, RXE_MAX_RETRIES}
        assert [qp.state for qp in qps] == [lib.IBV_QPS_RTS] * 2


@pytest.mark.transport("IB")
async def test_a_peer_that_is_gone_before_its_retries_are_limited_is_no_error(
    simulation: Simulation,
) -> None:
    simulation.far.vendor_id = RXE_VENDOR_ID
    simulation.world.calls.hooks["ibv_modify_qp"] = mock.Mock(side_effect=Failure(errno.EINVAL))
    async with connected(simulation, ConnectionOptions(retry_count=7)):
        assert RXE_MAX_RETRIES not in [qp.retry_count for qp in simulation.world.all(QueuePair)]


def in_drained_state(simulation: Simulation, *hooks: Callable[[QueuePair], None]) -> None:
    """Call each of the hooks in a call of ibv_modify_qp() on a drained queue pair, in turn."""
    left = list(hooks)

    def enter() -> None:
        drained = [qp for qp in simulation.queue_pairs() if qp.state == lib.IBV_QPS_SQD]
        if drained and left:
            left.pop(0)(drained[0])

    simulation.world.calls.hooks["ibv_modify_qp"] = enter


def end_and_fail(qp: QueuePair) -> None:
    """Let the connection end before a call, which then fails."""
    qp.world.network.fail_queue_pair(qp)
    raise Failure(errno.EINVAL)


def fail(qp: QueuePair) -> None:
    """Let a call fail."""
    raise Failure(errno.EINVAL)


@pytest.mark.transport("IB")
async def test_limiting_the_retries_does_not_wait_for_a_connection_that_has_ended(
    simulation: Simulation,
) -> None:
    simulation.far.vendor_id = RXE_VENDOR_ID
    in_drained_state(simulation, end_and_fail)
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect(FAR, PORT), await accepting as far:
            with pytest.raises(aiordma.RdmaError):
                await far.recv()
    assert simulation.world.calls.counts["ibv_modify_qp"] < 10


@pytest.mark.transport("IB")
async def test_a_send_queue_that_drains_again_is_waited_for(simulation: Simulation) -> None:
    """Linux 6.12 drains it once more after the change of the retry count."""
    simulation.far.vendor_id = RXE_VENDOR_ID
    in_drained_state(simulation, lambda qp: None, fail, fail)
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect(FAR, PORT) as near, await accepting as far:
            await far.send(b"sent")
            assert await near.recv() == b"sent"


@pytest.mark.transport("IB")
async def test_a_send_queue_that_stays_drained_fails_the_accept(simulation: Simulation) -> None:
    """Nothing that is posted would be sent."""
    simulation.far.vendor_id = RXE_VENDOR_ID
    in_drained_state(simulation, *[fail] * 3000)
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect(FAR, PORT) as near:
            with pytest.raises(VerbsError, match="ibv_modify_qp"):
                await accepting
            with pytest.raises(aiordma.PeerClosed):
                await near.recv()


def test_options_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"keepalive": -1}, {"peer_timeout": 0}, {"keepalive": 1e6}]
    for one in wrong:
        for kind in (ConnectionOptions, StreamOptions):
            with pytest.raises(ValueError, match=next(iter(one))):
                kind(**one)
