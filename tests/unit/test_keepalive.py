"""Peers whose machine does not answer any more, and the checks that detect it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import loops
import pytest
from helpers import SHARED
from simulator import Simulation
from simulator.network import RETRY_SECONDS
from simulator.verbs import QueuePair
from simulator.world import Failure
from streaming import streaming

import aiordma
from aiordma import (
    ByteStream,
    Connection,
    ConnectionOptions,
    PeerClosed,
    PeerTimeout,
    StreamOptions,
    WorkRequestError,
)
from aiordma._native import lib
from aiordma.asyncio.errors import as_os_error
from aiordma.qp.retries import RXE_MAX_RETRIES
from aiordma.verbs.device import RXE_VENDOR_ID

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
        await near.send(b"nobody is there")
        with pytest.raises(PeerTimeout):
            await near.recv()
        assert loops.now() - began <= TIMEOUT + longest(simulation)


@pytest.mark.transport("IWARP")  # on RoCE the device repeats
async def test_a_probe_behind_slow_requests_is_given_more_time(simulation: Simulation) -> None:
    async with connected(simulation, WATCHED) as (near, far):
        region = await far.allocate(8, SHARED)
        into = await near.allocate(8, SHARED)
        simulation.network.read_delay = TIMEOUT + 1  # the probe is a read, too
        reading = [loops.create_task(near.read(region.remote, into)) for _ in range(2)]
        for task in reading:
            await task
        simulation.network.read_delay = 0
        await loops.sleep(4 * TIMEOUT)
        assert not near.closed
        region.close()
        into.close()


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
            await near.send(b"nobody is there")
        with pytest.raises(PeerTimeout):
            await near.receive()
        assert loops.now() - began <= 2 * KEEPALIVE + TIMEOUT + longest(simulation)
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


@pytest.mark.transport("IB")
async def test_a_connection_whose_send_queue_stays_drained_is_broken(
    simulation: Simulation,
) -> None:
    """It would never send. Neither end waits for it."""
    simulation.far.vendor_id = RXE_VENDOR_ID
    tries = iter(range(1000))

    def refuse() -> None:
        states = [qp.state for qp in simulation.world.all(QueuePair)]
        if lib.IBV_QPS_SQD in states and next(tries, None) is not None:
            raise Failure(errno.EINVAL)

    simulation.world.calls.hooks["ibv_modify_qp"] = refuse
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect(FAR, PORT, options=ConnectionOptions(retry_count=7))
        far = await accepting
        for end in (near, far):
            with pytest.raises((PeerClosed, WorkRequestError)):
                await end.recv()
            end.abort()
            await end.aclose()


def test_options_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"keepalive": -1}, {"peer_timeout": 0}, {"keepalive": 1e6}]
    for one in wrong:
        for kind in (ConnectionOptions, StreamOptions):
            with pytest.raises(ValueError, match=next(iter(one))):
                kind(**one)
