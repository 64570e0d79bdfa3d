"""SyncCmId: ids whose calls run in worker threads; endpoints; migration from and to a loop."""

from __future__ import annotations

import errno
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import loops
import pytest
from simulator import Simulation
from simulator.ids import PORT, SMALL, listening, make_qp, requested, resolved, target

from aiordma import (
    AddrInfo,
    BusyError,
    DeviceRemoved,
    LocalClosed,
    PeerClosed,
    RdmaError,
    Rejected,
    VerbsError,
    WcStatus,
    getaddrinfo,
)
from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.enums import AddrInfoFlags, CmEventType, PortSpace
from aiordma.rdmacm import CmEvent, ConnectionParameters

PARAMETERS = ConnectionParameters(b"hello")
PASSIVE = AddrInfo(flags=AddrInfoFlags.PASSIVE)


@asynccontextmanager
async def sync_listener(simulation: Simulation) -> AsyncIterator[SyncCmId]:
    """Make a synchronous id that listens at the far device during the block."""
    async with await SyncCmId.create() as listener:
        listener.bind_addr(target(simulation))
        listener.listen()
        yield listener


async def connecting(simulation: Simulation) -> tuple[SyncCmId, loops.Task[None]]:
    """Return an id that connects to the far device, and its task."""
    cm_id = await SyncCmId.create()
    await cm_id.resolve_addr(target(simulation))
    await cm_id.resolve_route()
    return cm_id, loops.create_task(cm_id.connect(PARAMETERS, lambda: make_sync_qp(cm_id)))


def make_sync_qp(cm_id: SyncCmId) -> None:
    cm_id.make_qp(SMALL)


@asynccontextmanager
async def connected(simulation: Simulation) -> AsyncIterator[tuple[SyncCmId, SyncCmId]]:
    async with sync_listener(simulation) as listener:
        active, task = await connecting(simulation)
        async with active, await listener.get_request() as passive:
            await passive.accept(PARAMETERS, lambda: make_sync_qp(passive))
            await task
            yield active, passive


async def test_ids_connect_and_exchange_a_message(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        assert active.event is not None
        assert active.event.private_data.rstrip(b"\0") == b"hello"
        sent, received = await active.reg_read(b"ping" * 4), await passive.reg_msgs(bytearray(16))
        passive.cm_id.post_recv(7, received, 0, 16)
        waiting = loops.create_task(passive.get_recv_comp())
        await loops.sleep(1)
        with pytest.raises(BusyError):
            await passive.get_recv_comp()
        active.cm_id.post_send(8, sent, 0, 16)
        assert (await active.get_send_comp()).check().wr_id == 8
        assert (await waiting).check().byte_len == 16
        passive.cm_id.post_recv(9, received, 0, 16)
        waiting = loops.create_task(passive.get_recv_comp())
        await loops.sleep(1)
        await active.disconnect()
        assert (await waiting).status is WcStatus.WR_FLUSH_ERR
        assert passive.state is CmState.DISCONNECTED
        with pytest.raises(PeerClosed):
            await passive.connect()


async def test_a_removed_device_ends_the_wait_for_completions(simulation: Simulation) -> None:
    async with connected(simulation) as (active, _):
        waiting = loops.create_task(active.get_send_comp())
        await loops.sleep(1)
        simulation.cm.remove_device(simulation.near)
        with pytest.raises((DeviceRemoved, VerbsError)):
            await waiting


async def test_a_rejection_is_raised_by_connect(simulation: Simulation) -> None:
    async with sync_listener(simulation) as listener:
        active, task = await connecting(simulation)
        async with active, await listener.get_request() as passive:
            passive.reject(b"no")
            with pytest.raises(Rejected):
                await task
            assert active.state is CmState.FAILED
            simulation.world.calls.fail("rdma_resolve_addr", errno.ENODEV)
    async with await SyncCmId.create() as cm_id:
        with pytest.raises(RdmaError):
            await cm_id.resolve_addr(target(simulation))
        assert cm_id.state is CmState.IDLE


async def test_requests_are_returned_in_order_each_on_a_channel_of_its_own(
    simulation: Simulation,
) -> None:
    async with sync_listener(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1)
        peers = [await connecting(simulation) for _ in range(2)]
        await loops.sleep(1)
        requests = [await waiting, await listener.get_request()]
        channels = {simulation.cm.id_of(one).channel for one in (listener, *requests)}
        assert len(channels) == 3
        for request, (peer, task) in zip(requests, peers, strict=True):
            assert request.peer_address == peer.local_address
            await request.aclose()
            with pytest.raises(Rejected):
                await task
            await peer.aclose()
    assert [request async for request in listener] == []


async def test_a_request_without_a_channel_is_rejected(simulation: Simulation) -> None:
    async with sync_listener(simulation) as listener:
        peers = [await connecting(simulation) for _ in range(2)]
        await loops.sleep(1)
        simulation.world.calls.fail("rdma_create_event_channel", errno.EMFILE)
        with pytest.raises(VerbsError, match="rdma_create_event_channel"):
            await listener.get_request()
        async with await listener.get_request() as request:
            assert request.peer_address == peers[1][0].local_address
        for peer, task in peers:
            with pytest.raises(Rejected):
                await task
            await peer.aclose()


async def test_cancelling_while_a_request_is_prepared_loses_no_request(
    simulation: Simulation,
) -> None:
    async with sync_listener(simulation) as listener:
        simulation.world.calls.delay("rdma_migrate_id", after=1)
        waiting = loops.create_task(listener.get_request())
        peer, task = await connecting(simulation)
        await loops.sleep(0.5)
        waiting.cancel()
        with pytest.raises(loops.CancelledError):
            await waiting
        async with await listener.get_request() as request:
            assert request.peer_address == peer.local_address
        assert simulation.world.calls.counts["rdma_migrate_id"] == 1
        await loops.wait([task])
        await peer.aclose()


async def test_a_request_that_arrives_while_the_listener_closes_is_rejected(
    simulation: Simulation,
) -> None:
    async with sync_listener(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        peer, task = await connecting(simulation)
        handle_event = listener.handle_event

        def close_first(event: CmEvent) -> None:
            listener.abort()
            handle_event(event)

        listener.handle_event = close_first  # type: ignore[method-assign]
        with pytest.raises(Rejected):
            await task
        with pytest.raises(LocalClosed):
            await waiting
        await peer.aclose()


async def test_a_late_change_by_a_thread_does_not_reopen_a_closed_id(
    simulation: Simulation,
) -> None:
    cm_id = await SyncCmId.create()
    cm_id.abort()
    cm_id._state.current = CmState.CONNECTED
    assert cm_id.state is CmState.CLOSED
    with pytest.raises(LocalClosed):
        await cm_id.get_request()
    await cm_id.aclose()


async def test_closing_and_cancelling_end_a_wait(simulation: Simulation) -> None:
    simulation.cm.hold(CmEventType.ADDR_RESOLVED)
    for end in ("abort", "cancel"):
        async with await SyncCmId.create() as cm_id:
            task = loops.create_task(cm_id.resolve_addr(target(simulation)))
            await loops.sleep(1)
            with pytest.raises(BusyError):
                await cm_id.resolve_route()
            (cm_id.abort if end == "abort" else task.cancel)()
            with pytest.raises((LocalClosed, *loops.CancelledError)):
                await task


async def test_a_removed_device_ends_the_wait_for_requests(simulation: Simulation) -> None:
    async with sync_listener(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1)
        simulation.cm.remove_device(simulation.far)
        with pytest.raises(DeviceRemoved):
            await waiting


@pytest.mark.transport("IB")
async def test_a_datagram_request_is_accepted_without_an_event(simulation: Simulation) -> None:
    async with (
        listening(simulation, PortSpace.UDP) as listener,
        await resolved(simulation, PortSpace.UDP) as active,
    ):
        task = loops.create_task(active.connect(ConnectionParameters(qp_num=5)))
        async with await listener.get_request() as passive:
            await passive.accept(ConnectionParameters(qp_num=17))
            assert passive.state is CmState.CONNECTED
        await task
        assert active.established is not None
        assert active.established.qp_num == 17


# --- endpoints ---


async def test_endpoints_connect(simulation: Simulation) -> None:
    simulation.names["far"] = [simulation.far.host]
    (here,) = await getaddrinfo("far", PORT, PASSIVE)
    (there,) = await getaddrinfo("far", PORT)
    async with await SyncCmId.create_ep(here, None, SMALL) as listener:
        assert listener.state is CmState.ADDR_BOUND
        listener.listen()
        async with await SyncCmId.create_ep(there, None, SMALL) as active:
            assert active.state is CmState.ROUTE_RESOLVED
            task = loops.create_task(active.connect(PARAMETERS))
            async with await listener.get_request() as passive:
                assert passive.cm_id.has_qp
                await passive.accept(PARAMETERS)
                await task
        simulation.world.calls.fail("rdma_create_qp", errno.ENOMEM)
        async with await SyncCmId.create_ep(there) as active:
            task = loops.create_task(active.connect(PARAMETERS, lambda: make_sync_qp(active)))
            with pytest.raises(VerbsError, match="rdma_create_qp"):
                await task


async def test_an_endpoint_that_cannot_be_made_leaves_nothing(simulation: Simulation) -> None:
    there = AddrInfo(destination=target(simulation))
    for function, code in (("rdma_create_ep", errno.ENOMEM), ("rdma_migrate_id", errno.ENXIO)):
        simulation.world.calls.fail(function, code)
        with pytest.raises(VerbsError, match=function):
            await SyncCmId.create_ep(there, None, SMALL)
    simulation.world.calls.fail("rdma_create_id", errno.ENOMEM)
    with pytest.raises(VerbsError, match="rdma_create_id"):
        await SyncCmId.create()
    task = loops.create_task(SyncCmId.create_ep(there))
    await loops.sleep(0.001)
    task.cancel()
    with pytest.raises(loops.CancelledError):
        await task


# --- migration ---


async def test_an_id_migrates_at_every_step(simulation: Simulation) -> None:
    async with listening(simulation) as listener:
        first = await AsyncCmId.create()
        await first.resolve_addr(target(simulation))
        second = await first.migrate(None)
        assert (first.state, second.state) == (CmState.CLOSED, CmState.ADDR_RESOLVED)
        await first.aclose()
        with pytest.raises(LocalClosed):
            await first.migrate(None)
        await second.resolve_route()
        third = await second.migrate()
        assert second.event_fds() == []
        second.read_events()  # as a wait for completions does: it leaves the events to the loop
        task = loops.create_task(third.connect(PARAMETERS, lambda: make_qp(third)))
        request = await (await (await listener.get_request()).migrate(None)).migrate()
        await request.accept(PARAMETERS, lambda: make_qp(request))
        await task
        await request.disconnect()
        moved = await (await third.migrate(None)).migrate()
        assert isinstance(moved.failure("x"), PeerClosed)
        for cm_id in (second, third, moved, request):
            await cm_id.aclose()


async def test_a_listener_migrates_with_its_channel_and_requests(simulation: Simulation) -> None:
    """No function of librdmacm is called, so no request can be lost."""
    calls = simulation.world.calls
    async with listening(simulation) as listener:
        active, task = await connecting(simulation)
        await loops.sleep(1)
        before = calls.counts["rdma_migrate_id"]
        there = await listener.migrate(None)
        back = await there.migrate()
        assert calls.counts["rdma_migrate_id"] == before
        async with await back.get_request() as request:
            assert request.peer_address == active.local_address
        with pytest.raises(Rejected):
            await task
        await active.aclose()
        await back.aclose()
        assert simulation.cm.listeners == []


async def test_migrating_an_id_in_use_raises_busy(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        with pytest.raises(BusyError):
            await request.active.migrate(None)
    async with sync_listener(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1)
        with pytest.raises(BusyError):
            await listener.migrate()
        waiting.cancel()
        await loops.wait([waiting])


# --- a loop that ends first ---


@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_an_id_is_destroyed_after_its_loop_was_closed(simulation: Simulation, kind: str) -> None:
    async def body() -> None:
        simulation.world.calls.delay("rdma_destroy_id", before=1)
        (await AsyncCmId.create()).abort()
        (await SyncCmId.create()).abort()

    simulation.run(body, kind)
    gc.collect()
    assert simulation.left() == {}
