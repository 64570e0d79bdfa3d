"""Endpoint: the causes that end a connection, and the first message of an iWARP connection."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from simulator import Simulation
from simulator.verbs import QueuePair
from simulator.world import lib

import aiordma
from aiordma import Connection, ConnectionOptions, DeviceRemoved, PeerClosed, VerbsError
from aiordma.enums import CmEventType
from aiordma.qp.endpoint import FIRST_MESSAGE_SECONDS, FLUSH_SECONDS
from aiordma.verbs.device import SIW_VENDOR_ID

HOST, PORT = "10.0.0.2", 7471
OPTIONS = ConnectionOptions(send_depth=10, recv_depth=10)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends. Abort both after the block."""
    async with aiordma.listen(HOST, PORT, options=OPTIONS) as listener:
        accepting = loops.create_task(listener.accept())
        active = await aiordma.connect(HOST, PORT, options=OPTIONS)
        passive = await accepting
        yield active, passive
        for end in (active, passive):
            end.abort()
            await end.aclose()


def queue_pair_of(simulation: Simulation, connection: Connection) -> QueuePair:
    qp = simulation.cm.id_of(connection._endpoint.cm).qp
    assert qp is not None
    return qp


async def receiving(connection: Connection) -> loops.Task[bytes]:
    task = loops.create_task(connection.recv())
    await loops.sleep(1)
    return task


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, DeviceRemoved), (errno.ENODEV, DeviceRemoved), (errno.EINVAL, VerbsError)],
)
async def test_a_device_failure_is_raised_to_receivers_and_senders(
    simulation: Simulation, code: int, kind: type[Exception]
) -> None:
    async with connected() as (active, _):
        task = await receiving(active)
        queue = queue_pair_of(simulation, active).recv_cq.pointer
        queue.poll_failure = -code
        lib.sim_raise_completion_event(queue)
        for call in (lambda: task, lambda: active.send(b"x"), active.recv):
            with pytest.raises(kind, match="ibv_poll_cq") as caught:
                await call()
            assert type(caught.value) is kind


async def test_the_first_cause_is_kept(simulation: Simulation) -> None:
    async with connected() as (active, _):
        simulation.cm.put(active._endpoint.cm, CmEventType.DEVICE_REMOVAL, status=-errno.EIO)
        await loops.sleep(1)
        active._endpoint.device_failed(VerbsError(errno.EINVAL, "ibv_get_cq_event"))
        with pytest.raises(DeviceRemoved, match="device was removed: "):
            await active.recv()


@pytest.mark.parametrize("nbytes", [1, 1000])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTCONN])
async def test_a_refused_send_ends_the_connection(
    simulation: Simulation, nbytes: int, code: int
) -> None:
    """On iWARP, ENOTCONN means that the peer has closed."""
    async with connected() as (active, _):
        await active.send(b"first")
        queue_pair_of(simulation, active).pointer.sends.refusal = code
        is_closed = simulation.near.is_iwarp and code == errno.ENOTCONN
        for _ in range(2):
            with pytest.raises(PeerClosed if is_closed else VerbsError):
                await active.send(bytes(nbytes))
        assert active.closed


async def test_a_send_without_memory_does_not_end_the_connection(simulation: Simulation) -> None:
    async with connected() as (active, passive):
        for _ in range(20):  # no send credit is lost either
            for name in ("ibv_reg_mr", "ibv_reg_mr_iova2"):
                simulation.world.calls.fail(name, errno.ENOMEM)
            with pytest.raises(VerbsError, match="ibv_reg_mr"):
                await active.send(bytes(1000))
            simulation.world.calls.failures.clear()
        await active.send(bytes(1000))
        assert await passive.recv() == bytes(1000)


async def test_a_message_whose_slot_is_refused_is_not_lost(simulation: Simulation) -> None:
    async with connected() as (active, passive):
        await active.send(b"hello")
        await loops.sleep(1)
        queue_pair_of(simulation, passive).pointer.receives.refusal = errno.EINVAL
        assert await passive.recv() == b"hello"
        with pytest.raises(VerbsError, match="ibv_post_recv"):
            await passive.recv()


@pytest.mark.transport("IB")
async def test_the_wait_for_a_flush_ends_after_a_timeout(simulation: Simulation) -> None:
    async with connected() as (active, passive):
        simulation.network.loses_flushes = True
        task = await receiving(active)
        passive.abort()
        await loops.sleep(FLUSH_SECONDS / 2)
        assert not task.done()  # messages might still come before the flushed receives
        with pytest.raises(PeerClosed):
            await task


# --- the first message of an iWARP connection ---


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
    async with connected() as (active, passive):
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
    async with connected() as (active, passive):
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
    async with connected() as (_, passive):
        resumed: list[None] = []
        endpoint = passive._endpoint
        monkeypatch.setattr(endpoint.data_path, "resume", lambda: resumed.append(None))
        passive.abort()
        endpoint.message_arrived()
        endpoint._no_first_message()
        assert resumed == []
