"""SyncCmId: failures and races of calls in worker threads; migration; a loop that ends first."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation
from simulator.ids import (
    SMALL,
    accept,
    connect,
    connected,
    listening,
    requested,
    resolved,
    send_one,
    target,
)

from aiordma import AddrInfo, BusyError, DeviceRemoved, LocalClosed, Rejected, VerbsError
from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.cm.handle import IdHandle
from aiordma.cm.own_completions import OwnCompletions
from aiordma.enums import AddrInfoFlags, CmEventType, PortSpace
from aiordma.rdmacm import CmEvent, ConnectionParameters, SocketAddress
from aiordma.rdmacm.channel import EVENT_BATCH


async def sync_listener(simulation: Simulation) -> SyncCmId:
    """Return a synchronous id that listens at the far device."""
    listener = await SyncCmId.create()
    listener.bind_addr(target(simulation))
    listener.listen()
    return listener


async def connecting(simulation: Simulation) -> tuple[SyncCmId, loops.Task[None]]:
    """Return an id that connects to the far device, and its task."""
    cm_id = await SyncCmId.create()
    await cm_id.resolve_addr(target(simulation))
    await cm_id.resolve_route()
    return cm_id, loops.create_task(connect(cm_id))


async def check_rejected(peer: SyncCmId, task: loops.Task[None]) -> None:
    with pytest.raises(Rejected):
        await task
    await peer.aclose()


async def test_a_removed_device_ends_every_wait(simulation: Simulation) -> None:
    async with await sync_listener(simulation) as listener:
        active, task = await connecting(simulation)
        async with active, await listener.get_request() as passive:
            await accept(passive)
            await task
            calls: list[Callable[[], Coroutine[Any, Any, object]]]
            calls = [active.get_send_comp, passive.get_recv_comp, listener.get_request]
            waiting = [loops.create_task(call()) for call in calls]
            await loops.sleep(1)
            for call in calls:
                with pytest.raises(BusyError):
                    await call()
            for device in (simulation.near, simulation.far):
                simulation.cm.remove_device(device)
            for ended in waiting:
                with pytest.raises((DeviceRemoved, VerbsError)):
                    await ended


async def test_cancelling_loses_no_request(simulation: Simulation) -> None:
    async with await sync_listener(simulation) as listener:
        simulation.world.calls.delay("rdma_migrate_id", after=1)
        waiting = loops.create_task(listener.get_request())
        peer, task = await connecting(simulation)
        await loops.sleep(0.5)
        await loops.cancel(waiting)
        async with await listener.get_request() as request:
            assert request.peer_address == peer.local_address
        assert simulation.world.calls.counts["rdma_migrate_id"] == 1
        await check_rejected(peer, task)


async def test_a_request_for_a_closing_listener_is_rejected(simulation: Simulation) -> None:
    async with await sync_listener(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        peer, task = await connecting(simulation)
        handle_event = listener.handle_event

        def close_first(event: CmEvent) -> None:
            listener.abort()
            handle_event(event)

        listener.handle_event = close_first  # type: ignore[method-assign]
        await check_rejected(peer, task)
        with pytest.raises(LocalClosed):
            await waiting
        assert [request async for request in listener] == []


async def test_a_late_change_does_not_reopen_a_closed_id(simulation: Simulation) -> None:
    cm_id = await SyncCmId.create()
    cm_id.abort()
    cm_id.id_state.move(CmState.CONNECTED)
    assert cm_id.state is CmState.CLOSED
    with pytest.raises(LocalClosed):
        await cm_id.get_request()
    await cm_id.aclose()


async def test_an_id_that_cannot_be_made_leaves_nothing(simulation: Simulation) -> None:
    there = AddrInfo(destination=target(simulation))
    for function, code in (("rdma_create_ep", errno.ENOMEM), ("rdma_migrate_id", errno.ENXIO)):
        simulation.world.calls.fail(function, code)
        with pytest.raises(VerbsError, match=function):
            await SyncCmId.create_ep(there, None, SMALL)
    simulation.world.calls.fail("rdma_create_id", errno.ENOMEM)
    with pytest.raises(VerbsError, match="rdma_create_id"):
        await SyncCmId.create()


async def test_a_listener_migrates_with_its_channel_and_requests(simulation: Simulation) -> None:
    """No function of librdmacm is called, so no request can be lost."""
    calls = simulation.world.calls
    async with listening(simulation) as listener:
        peer, task = await connecting(simulation)
        await loops.sleep(1)
        before = calls.counts["rdma_migrate_id"]
        there = await listener.migrate(None)
        back = await there.migrate()
        assert calls.counts["rdma_migrate_id"] == before
        async with back, await back.get_request() as request:
            assert request.peer_address == peer.local_address
        await check_rejected(peer, task)
        assert simulation.cm.listeners == []


async def test_migrating_an_id_during_a_call_raises_busy(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        with pytest.raises(BusyError):
            await request.active.migrate(None)


@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_an_id_is_destroyed_after_its_loop_was_closed(simulation: Simulation, kind: str) -> None:
    async def body() -> None:
        simulation.world.calls.delay("rdma_destroy_id", before=1)
        (await AsyncCmId.create()).abort()
        (await SyncCmId.create()).abort()

    simulation.run(body, kind)
    gc.collect()
    assert simulation.left() == {}


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


async def test_completions_that_no_task_has_taken_migrate(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        await send_one(active, passive)
        completion = passive.cm_id.recv_queue().poll()  # as the thread of a cancelled wait does
        assert completion is not None
        passive._own_completions()._received.unread.append(completion)
        async with await passive.migrate(None) as moved:
            assert (await moved.get_recv_comp()).check().byte_len == 16
            with pytest.raises(LocalClosed):
                await passive.get_recv_comp()


async def test_a_wait_for_completions_notices_the_end_of_a_migrated_id(
    simulation: Simulation,
) -> None:
    async with connected(simulation) as (_, passive):
        there = await passive.migrate(None)
        waiting = loops.create_task(there.get_recv_comp())
        await loops.sleep(1)
        async with await there.migrate() as back:
            with pytest.raises(BusyError):
                await back.get_recv_comp()
            simulation.cm.remove_device(simulation.far)
            with pytest.raises(DeviceRemoved):
                await waiting


def test_a_wait_for_completions_does_not_begin_after_the_end() -> None:
    """The state has changed since the task has looked at it."""
    for state in (CmState.FAILED, CmState.REMOVED, CmState.CLOSED):
        queue: Any = Mock()
        completions = OwnCompletions(Mock(), Mock(current=state))
        completions._read_one(Mock(), queue, Mock(), Mock())
        queue.poll.assert_not_called()


async def test_a_request_whose_queue_pair_cannot_be_made_is_destroyed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SyncCmId, handle: IdHandle) -> None:
        raise ValueError("the protection domain is closed")

    async with await sync_listener(simulation) as listener:
        peer, task = await connecting(simulation)
        with monkeypatch.context() as patch:
            patch.setattr(SyncCmId, "_prepare", refuse)
            with pytest.raises(ValueError, match="is closed"):
                await listener.get_request()
        await check_rejected(peer, task)


async def test_a_sync_id_resolves_its_route_and_connects(simulation: Simulation) -> None:
    async with listening(simulation) as listener, await SyncCmId.create() as cm_id:
        await cm_id.resolve_addr(target(simulation))
        await cm_id.create_qp(SMALL)
        task = loops.create_task(cm_id.resolve_and_connect(ConnectionParameters(b"hello")))
        async with await listener.get_request() as request:
            await accept(request)
            await task
            assert cm_id.state is CmState.CONNECTED
