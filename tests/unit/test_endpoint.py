"""Endpoint: the causes that end a connection, and the first message of an iWARP connection."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from simulator import Simulation
from simulator.pairs import connected
from simulator.world import lib

import aiordma
from aiordma import Connection, DeviceRemoved, PeerClosed, VerbsError
from aiordma.enums import CmEventType
from aiordma.qp.endpoint import FIRST_MESSAGE_SECONDS, FLUSH_SECONDS
from aiordma.verbs.device import SIW_VENDOR_ID


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, DeviceRemoved), (errno.ENODEV, DeviceRemoved), (errno.EINVAL, VerbsError)],
)
async def test_a_device_failure_is_raised_to_receivers_and_senders(
    simulation: Simulation, code: int, kind: type[Exception]
) -> None:
    async with connected(simulation) as pair:
        active, queue = pair.near.connection, pair.near.qp.recv_cq.pointer
        task = loops.create_task(active.recv())
        await loops.sleep(1)
        queue.poll_failure = -code
        lib.sim_raise_completion_event(queue)
        for call in (lambda: task, lambda: active.send(b"x"), active.recv):
            with pytest.raises(kind, match="ibv_poll_cq") as caught:
                await call()
            assert type(caught.value) is kind


async def test_the_first_cause_is_kept(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        endpoint = pair.near.connection._endpoint
        simulation.cm.put(endpoint.cm, CmEventType.DEVICE_REMOVAL, status=-errno.EIO)
        await loops.sleep(1)
        endpoint.device_failed(VerbsError(errno.EINVAL, "ibv_get_cq_event"))
        with pytest.raises(DeviceRemoved, match="device was removed: "):
            await pair.near.connection.recv()


@pytest.mark.transport("IB")
async def test_the_wait_for_a_flush_ends_after_a_timeout(simulation: Simulation) -> None:
    async with connected(simulation) as pair:
        simulation.network.loses_flushes = True
        task = loops.create_task(pair.near.connection.recv())
        await loops.sleep(1)
        pair.far.connection.abort()
        await loops.sleep(FLUSH_SECONDS / 2)
        assert not task.done()  # messages might still come before the flushed receives
        with pytest.raises(PeerClosed):
            await task


@asynccontextmanager
async def iwarp_pair() -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends, without a message. Abort both after the block."""
    async with aiordma.listen("10.0.0.2", 7471) as listener:
        accepting = loops.create_task(listener.accept())
        active = await aiordma.connect("10.0.0.2", 7471)
        passive = await accepting
        yield active, passive
        for end in (active, passive):
            end.abort()
            await end.aclose()


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize(
    ("is_siw", "has_received", "probes"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
async def test_only_siw_without_a_received_message_is_probed(
    simulation: Simulation,
    monkeypatch: pytest.MonkeyPatch,
    is_siw: bool,
    has_received: bool,
    probes: int,
) -> None:
    simulation.far.vendor_id = SIW_VENDOR_ID * is_siw
    async with iwarp_pair() as (active, passive):
        probed: list[None] = []
        monkeypatch.setattr(passive._endpoint.data_path, "probe", lambda: probed.append(None))
        if has_received:
            await active.send(b"first")
        await loops.sleep(1)
        assert len(probed) == probes
        await passive.send(b"answer")
        assert await active.recv() == b"answer"


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("sends_first", [True, False])
async def test_the_accepting_side_sends_after_the_first_message_or_a_short_time(
    simulation: Simulation, sends_first: bool
) -> None:
    async with iwarp_pair() as (active, passive):
        begun = simulation.world.now
        task = loops.create_task(passive.send(b"answer"))
        await loops.sleep(0.001)
        assert not task.done()
        if sends_first:
            await active.send(b"first")
        await task
        took = simulation.world.now - begun
        assert (took < FIRST_MESSAGE_SECONDS / 2) is sends_first


@pytest.mark.transport("IWARP")
async def test_an_aborted_endpoint_does_not_resume_sends(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message or its timeout can come while the queue pair is being destroyed."""
    async with iwarp_pair() as (_, passive):
        endpoint = passive._endpoint
        monkeypatch.setattr(endpoint.data_path, "resume", pytest.fail)
        passive.abort()
        endpoint.message_arrived()
        endpoint._no_first_message()
