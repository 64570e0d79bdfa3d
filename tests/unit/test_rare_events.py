"""Ids and connections: a call fails, or an event comes, at a moment when that is rare."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.cm import Id
from simulator.ids import PORT, SMALL, connect, connected, listening, requested, resolved, target
from simulator.verbs import CompletionQueue

import aiordma
from aiordma import AccessFlags, AddrInfo, DeviceRemoved, PeerClosed, VerbsError
from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.dispatch import LoopDevice
from aiordma.enums import AddrInfoFlags, CmEventType, PortSpace
from aiordma.loop import running_loop
from aiordma.rdmacm import ConnectionParameters, SocketAddress
from aiordma.rdmacm.channel import EVENT_BATCH
from aiordma.verbs.device import SIW_VENDOR_ID

# --- ids ---


async def test_an_id_can_listen_after_a_failure(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        cm_id.bind_addr(target(simulation))
        simulation.world.calls.fail("rdma_listen", errno.EADDRINUSE)
        with pytest.raises(VerbsError, match="port is in use"):
            cm_id.listen()
        cm_id.listen()
        assert cm_id.state is CmState.LISTENING


async def test_a_request_that_cannot_be_rejected_is_refused(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        simulation.world.calls.fail("rdma_reject", errno.EINVAL)
        request.passive.reject(b"no")
        assert request.passive.state is CmState.REFUSED


async def test_a_device_that_could_not_be_opened_is_opened_later(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        device = LoopDevice.of(running_loop(), cm_id.device())
        for name in ("ibv_alloc_pd", "ibv_create_comp_channel"):
            simulation.world.calls.fail(name, errno.ENOMEM)
            with pytest.raises(VerbsError, match=name):
                device.reserve(4)
        device.reserve(4)
        device.release()


async def test_a_disconnect_that_fails_leaves_it_to_the_peer(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        simulation.world.calls.fail("rdma_disconnect", errno.EINVAL)
        active.start_disconnect()
        await loops.sleep(1)
        states = [active.state]
        passive.start_disconnect()
        await loops.sleep(1)
        states.append(active.state)
        assert states == [CmState.DISCONNECTING, CmState.DISCONNECTED]
    assert active.local_address == passive.peer_address


async def test_a_completion_that_comes_before_the_queue_is_armed_is_found(
    simulation: Simulation,
) -> None:
    async with connected(simulation) as (active, passive):
        sent, received = await active.reg_read(bytes(16)), await passive.reg_msgs(bytearray(16))
        passive.cm_id.post_recv(7, received, 0, 16)
        active.cm_id.post_send(8, sent, 0, 16)
        await loops.sleep(1)
        for queue in simulation.world.all(CompletionQueue):  # the first poll finds nothing
            queue.pointer.hidden_until = queue.pointer.polls + 2
        assert (await passive.get_recv_comp()).check().byte_len == 16


async def test_a_group_that_a_synchronous_id_cannot_join(simulation: Simulation) -> None:
    async with await SyncCmId.create(PortSpace.UDP) as cm_id:
        cm_id.bind_addr(target(simulation))
        simulation.world.calls.fail("rdma_join_multicast", errno.EINVAL)
        with pytest.raises(VerbsError, match="rdma_join_multicast"):
            await cm_id.join_multicast(SocketAddress("239.1.1.1", 0))
        assert cm_id.state is CmState.ADDR_BOUND


async def test_a_migrated_id_leaves_its_events_to_the_loop(simulation: Simulation) -> None:
    async with await SyncCmId.create() as cm_id:
        await cm_id.resolve_addr(target(simulation))
        for _ in range(2 * EVENT_BATCH):
            simulation.cm.put(cm_id, CmEventType.ADDR_CHANGE)
        async with await cm_id.migrate() as moved:
            assert cm_id.event_fds() == []
            cm_id.read_events()  # as a thread does that waits for completions
            await moved.resolve_route()


async def test_requests_of_an_endpoint_use_its_domain(simulation: Simulation) -> None:
    passive = AddrInfo(flags=AddrInfoFlags.PASSIVE, source=target(simulation))
    async with await SyncCmId.create() as bound, await resolved(simulation) as active:
        bound.bind_addr(target(simulation, 0))
        async with await SyncCmId.create_ep(passive, bound.cm_id.pd(), SMALL) as listener:
            listener.listen()
            connecting = loops.create_task(connect(active))
            async with await anext(listener) as request:
                assert request.cm_id.has_qp
                await request.accept(ConnectionParameters())
                await connecting
        assert [request async for request in listener] == []


@pytest.mark.transport("IB")
async def test_a_device_that_is_removed_while_a_datagram_request_is_accepted(
    simulation: Simulation,
) -> None:
    simulation.world.calls.delay("rdma_accept", after=1)
    async with (
        listening(simulation, PortSpace.UDP) as listener,
        await resolved(simulation, PortSpace.UDP) as active,
    ):
        task = loops.create_task(active.connect(ConnectionParameters(qp_num=5)))
        async with await listener.get_request() as passive:
            simulation.world.after(0.5, lambda: simulation.cm.remove_device(simulation.far))
            with pytest.raises(DeviceRemoved):
                await passive.accept(ConnectionParameters(qp_num=17))
        await task


# --- connections and streams ---


@asynccontextmanager
async def pair(simulation: Simulation, kind: str) -> AsyncIterator[tuple[list[Any], Any]]:
    """Connect two ends, "messages" or "streams". Close both after the block."""
    streams = kind == "streams"
    make: Any = aiordma.connect_stream if streams else aiordma.connect
    listen: Any = aiordma.listen_stream if streams else aiordma.listen
    async with listen(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        ends = [await make(simulation.far.host, PORT)]
        async with await accepting as far:
            yield ends, far
            for end in ends:
                await end.aclose()


both = pytest.mark.parametrize("kind", ["messages", "streams"])


@both
@pytest.mark.transport("IWARP")
async def test_a_probe_that_is_refused_ends_the_connection(
    simulation: Simulation, kind: str
) -> None:
    simulation.far.vendor_id = SIW_VENDOR_ID
    async with pair(simulation, kind) as (_, far):
        for qp in simulation.queue_pairs():
            qp.pointer.sends.refusal = errno.EINVAL
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await anext(far)


@both
async def test_a_connection_that_is_dropped_warns_and_is_destroyed(
    simulation: Simulation, kind: str
) -> None:
    async with pair(simulation, kind) as (ends, _):
        with pytest.warns(ResourceWarning, match=f"unclosed <.* port {PORT}, open>"):
            ends.clear()


@pytest.mark.transport("IB")
async def test_a_timer_that_cannot_be_set_is_ignored(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    simulation.world.calls.fail("ibv_modify_qp", errno.EINVAL)
    async with pair(simulation, "messages") as ((near,), far):
        await near.send(b"hello")
        assert await far.recv() == b"hello"
    assert "ignored: " in caplog.text


@pytest.mark.transport("IB")
async def test_a_disconnect_instead_of_the_confirmation_ends_the_connection(
    simulation: Simulation,
) -> None:
    simulation.cm.hold(CmEventType.ESTABLISHED)
    async with aiordma.listen(simulation.far.host, PORT) as listener:
        connecting = loops.create_task(aiordma.connect(simulation.far.host, PORT))
        accepting = loops.create_task(listener.accept())
        await loops.sleep(1)
        simulation.cm.held.clear()
        for cm_id in simulation.world.all(Id):
            if cm_id.qp is not None:
                cm_id.put(CmEventType.DISCONNECTED)
        for end in (await connecting, await accepting):
            with pytest.raises(PeerClosed):
                await end.recv()
            await end.aclose()


@pytest.mark.transport("IWARP")
async def test_a_flushed_read_waits_for_the_reason(simulation: Simulation) -> None:
    """The kernel flushes the requests before it reports that the peer has disconnected."""
    simulation.cm.hold(CmEventType.DISCONNECTED)
    async with pair(simulation, "messages") as ((near,), far):
        theirs = await far.allocate(10, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)
        ours = await near.allocate(10, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
        for qp in simulation.queue_pairs():
            qp.allowed = 0
        reading = loops.create_task(near.read(theirs.remote, ours))
        await loops.sleep(1)
        far.abort()
        await loops.sleep(0.001)
        assert not reading.done()
        simulation.cm.release()
        with pytest.raises(PeerClosed):
            await reading
