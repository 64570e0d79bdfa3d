"""AsyncCmId: events before, during and after a wait; cancelling, failing and closing."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock, patch

import loops
import pytest
from simulator import Simulation
from simulator import ids as steps
from simulator.cm import destroy
from simulator.ids import PORT, SMALL, accept, connect, connected, listening, requested, resolved
from simulator.verbs import CompletionQueue
from simulator.world import Failure

from aiordma import AddressError, BusyError, ConnectError, DeviceRemoved, LocalClosed, PeerClosed
from aiordma.cm import AsyncCmId, CmState, SyncCmId, handle
from aiordma.cm.occasional_log import OccasionalLog
from aiordma.dispatch import cm_events
from aiordma.enums import CmEventType, PortSpace
from aiordma.errors import RdmaError, Rejected, RouteError, VerbsError
from aiordma.loop import blocking_pool
from aiordma.loop.workers import WorkerPool
from aiordma.rdmacm import CmEvent, ConnectionParameters, SocketAddress, parse_address

E, S, UDP = CmEventType, CmState, PortSpace.UDP
ABSENT = parse_address("10.9.9.9", PORT)
GROUP = parse_address("239.1.1.1")
FAR = "10.0.0.2"


@pytest.mark.parametrize("call", ["rdma_resolve_route", "rdma_connect"])
async def test_an_event_can_precede_its_calls_return(simulation: Simulation, call: str) -> None:
    simulation.world.calls.delay(call, after=0.5)
    async with connected(simulation) as (active, passive):
        assert (active.state, passive.state) == (S.CONNECTED, S.CONNECTED)
        simulation.world.calls.fail("rdma_disconnect", errno.ENOTCONN)  # the other one came first
        await loops.gather(active.disconnect(), passive.disconnect())


@pytest.mark.parametrize("moment", ["before the event", "with the event"])
async def test_a_cancelled_waiter_loses_no_event(simulation: Simulation, moment: str) -> None:
    async with waiting(simulation, "address") as (cm_id, task):
        if moment == "with the event":
            cm_id.on_change = lambda: (task.cancel(), None)[1]
        else:
            await loops.cancel(task)
        simulation.cm.release()
        await loops.wait([task])
        await loops.sleep(1)
        cm_id.on_change = None
        assert cm_id.state is S.ADDR_RESOLVED
        await cm_id.resolve_route()


async def test_during_a_query_hints_and_calls_change_nothing(simulation: Simulation) -> None:
    async with waiting(simulation, "address") as (cm_id, task):
        for kind in (E.ADDR_CHANGE, E.TIMEWAIT_EXIT, CmEventType(99)):
            simulation.cm.put(cm_id, kind)
            await loops.sleep(0.1)
        with pytest.raises(RdmaError, match="not possible in state ADDR_QUERY"):
            await cm_id.resolve_addr(steps.target(simulation))
        assert not task.done()
        simulation.cm.release()
        await task


async def test_a_removal_during_a_query_is_an_address_error(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        task = loops.create_task(cm_id.resolve_addr(steps.target(simulation)))
        await loops.sleep(1e-6)
        simulation.cm.remove_device(simulation.near)
        with pytest.raises(AddressError, match="No such device"):
            await task


@pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])
async def test_a_call_that_fails_leaves_the_state_unchanged(
    simulation: Simulation, kind: type[AsyncCmId | SyncCmId]
) -> None:
    fail = simulation.world.calls.fail
    async with await kind.create() as cm_id:
        fail("rdma_bind_addr", errno.EADDRINUSE)
        with pytest.raises(VerbsError, match="port is in use"):
            cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        fail("rdma_resolve_addr", errno.ENODEV)
        with pytest.raises(AddressError, match="aiordma devices") as caught:
            await cm_id.resolve_addr(steps.target(simulation))
        assert isinstance(caught.value.__cause__, VerbsError)
        states = [cm_id.state]
        cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        states.append(cm_id.state)
        await cm_id.resolve_addr(steps.target(simulation))
        fail("rdma_resolve_route", errno.EINVAL)
        with pytest.raises(RouteError, match="Invalid argument"):
            await cm_id.resolve_route()
        assert [*states, cm_id.state] == [S.IDLE, S.ADDR_BOUND, S.ADDR_RESOLVED]


async def check_refused(cm_id: AsyncCmId, kind: type[RdmaError]) -> None:
    for name in ("bind_addr", "resolve_addr", "resolve_route", "connect", "listen", "accept"):
        with pytest.raises(kind, match=name):
            await getattr(cm_id, name)(*[ABSENT] * name.endswith("addr"))


async def test_calls_in_the_wrong_state_raise_and_are_not_made(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        address = active.local_address
        assert passive.peer_address == address
        made = len(simulation.world.calls.log)
        await check_refused(active, RdmaError)
        assert len(simulation.world.calls.log) == made
        for _ in range(2):
            passive.start_disconnect()
        assert passive.state is S.DISCONNECTING
        await loops.sleep(1)
        assert simulation.world.calls.counts["rdma_disconnect"] == 1
        await check_refused(active, PeerClosed)
        with pytest.raises(RdmaError):
            active.establish()
    await check_refused(active, LocalClosed)
    assert active.local_address == address


@asynccontextmanager
async def rejected_peers(simulation: Simulation, count: int) -> AsyncIterator[list[Any]]:
    """Connect numbered ids in their order during the block. All must be rejected in the end."""
    peers = [await resolved(simulation) for _ in range(count)]
    tasks = []
    for number, peer in enumerate(peers):
        tasks.append(loops.create_task(connect(peer, b"%d" % number)))
        await loops.sleep(0.1)
    yield tasks
    outcomes = await loops.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Rejected] * count
    for peer in peers:
        await peer.aclose()


async def test_requests_beyond_the_backlog_are_rejected(simulation: Simulation) -> None:
    async with listening(simulation, backlog=2) as listener, rejected_peers(simulation, 4) as tasks:
        assert [task.done() for task in tasks] == [False, False, True, True]
        await (await listener.get_request()).aclose()
        await listener.aclose()  # rejects the request that no task has taken
    with pytest.raises(LocalClosed):
        await listener.get_request()
    assert [request async for request in listener] == []


async def test_a_request_whose_device_was_removed_is_skipped(simulation: Simulation) -> None:
    async with listening(simulation) as listener, rejected_peers(simulation, 2):
        simulation.world.calls.fail("rdma_migrate_id", errno.ENXIO)
        async with await listener.get_request() as request:
            assert request.event is not None
            assert request.event.private_data.rstrip(b"\0") == b"1"


async def test_listening_during_another_call_raises_busy_error(simulation: Simulation) -> None:
    """Listening would change the channel during the call."""
    async with await AsyncCmId.create() as cm_id:
        cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        simulation.world.calls.delay("rdma_create_qp", before=1)
        call = loops.create_task(cm_id.create_qp(SMALL))
        await loops.sleep(0.5)
        with pytest.raises(BusyError):
            cm_id.listen()
        assert cm_id.state is S.ADDR_BOUND
        await call
        cm_id.listen()


@pytest.mark.parametrize(
    ("call", "gave_up", "error", "text"),
    [
        ("rdma_accept", False, ConnectError, r"10\.0\.0\.1:\d+ could not be accepted"),
        ("rdma_create_qp", False, VerbsError, "rdma_create_qp"),
        ("rdma_create_qp", True, ConnectError, "gave up before it was accepted"),
    ],
)
async def test_a_request_that_cannot_be_accepted_is_rejected(
    simulation: Simulation, call: str, gave_up: bool, error: type[RdmaError], text: str
) -> None:
    async with requested(simulation) as request:
        if gave_up:
            await request.active.aclose()
            await loops.sleep(1)
        simulation.world.calls.fail(call, errno.EINVAL)
        with pytest.raises(error, match=text):
            await accept(request.passive)
        assert request.passive.state is S.FAILED
        if call == "rdma_accept":  # otherwise it is rejected at once
            await request.passive.aclose()
        with pytest.raises(LocalClosed if gave_up else Rejected):
            await request.connecting


async def test_a_request_of_a_removed_device_cannot_be_accepted(simulation: Simulation) -> None:
    """The kernel refuses the rejection, too."""
    async with requested(simulation) as request:
        simulation.world.calls.fail("rdma_create_qp", errno.EIO)
        simulation.world.calls.fail("rdma_reject", errno.EINVAL)
        with pytest.raises(DeviceRemoved):
            await accept(request.passive)
        await request.passive.aclose()
        with pytest.raises(Rejected):
            await request.connecting


@pytest.mark.parametrize("gave_up", [False, True])
async def test_a_failed_reject_refuses_the_request(simulation: Simulation, gave_up: bool) -> None:
    async with requested(simulation) as request:
        if gave_up:
            await request.active.aclose()
            await loops.sleep(1)
        else:
            simulation.world.calls.fail("rdma_reject", errno.EINVAL)
        request.passive.reject(b"no")
        assert request.passive.state is S.REFUSED


@pytest.mark.transport("IB")
@pytest.mark.parametrize("step", ["connect", "accept"])
@pytest.mark.parametrize("kinds", [[E.ESTABLISHED, E.DISCONNECTED], [E.DISCONNECTED]], ids=len)
async def test_a_peer_that_disconnects_at_once_was_connected(
    simulation: Simulation, step: str, kinds: list[CmEventType]
) -> None:
    """Messages that the peer sent before can still be received."""
    async with waiting(simulation, step) as (cm_id, task):
        simulation.cm.held.clear()
        assert not task.done()
        for kind in kinds:
            simulation.cm.put(cm_id, kind, private_data=kind.name.encode())
        await task
        assert cm_id.state is S.DISCONNECTED
        assert isinstance(cm_id.failure("x"), PeerClosed)
        assert cm_id.failure("x") is not cm_id.failure("x")
        if E.ESTABLISHED in kinds:
            assert cm_id.established is not None
            assert cm_id.established.private_data == b"ESTABLISHED"


QUERIES = {"address": E.ADDR_RESOLVED, "route": E.ROUTE_RESOLVED, "group": E.MULTICAST_JOIN}


@asynccontextmanager
async def waiting(simulation: Simulation, step: str) -> AsyncIterator[tuple[AsyncCmId, Any]]:
    """Start a task that waits in a step of an id for an event. The event does not come."""
    if step in QUERIES:
        simulation.cm.hold(QUERIES[step])
        space = UDP if step == "group" else PortSpace.TCP
        async with await AsyncCmId.create(space) as cm_id:
            cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
            call: Any = cm_id.join_multicast(GROUP) if step == "group" else None
            if call is None:
                call = cm_id.resolve_addr(steps.target(simulation))
            if step == "route":
                await call
                call = cm_id.resolve_route()
            task: Any = loops.create_task(call)
            await loops.sleep(1)
            yield cm_id, task
        return
    async with requested(simulation) as request:
        simulation.cm.hold(E.ESTABLISHED)
        accepting = loops.create_task(accept(request.passive))
        await loops.sleep(1)
        is_active = step == "connect"
        yield (request.active, request.connecting) if is_active else (request.passive, accepting)
        request.passive.abort()
        await loops.wait([accepting])


@pytest.mark.transport("IB")
@pytest.mark.parametrize(
    ("step", "kind", "error"),
    [
        ("connect", E.REJECTED, Rejected),
        ("connect", E.DEVICE_REMOVAL, DeviceRemoved),
        ("connect", E.ADDR_RESOLVED, RdmaError),
        ("accept", E.REJECTED, ConnectError),
        ("accept", E.CONNECT_ERROR, ConnectError),
        ("group", E.MULTICAST_ERROR, ConnectError),
        ("group", E.DEVICE_REMOVAL, DeviceRemoved),
    ],
)
async def test_the_first_error_event_ends_a_wait(
    simulation: Simulation, step: str, kind: CmEventType, error: type[RdmaError]
) -> None:
    async with waiting(simulation, step) as (cm_id, task):
        if kind is E.DEVICE_REMOVAL:
            simulation.cm.remove_device(simulation.near)
        elif kind is E.MULTICAST_ERROR:
            simulation.datagrams.end_membership(GROUP.host)
        else:
            simulation.cm.put(cm_id, kind, status=28, private_data=b"because")
            simulation.cm.put(cm_id, E.CONNECT_ERROR)
        with pytest.raises(error) as caught:
            await task
        assert step != "connect" or type(caught.value) is error
        if step == "connect" and isinstance(caught.value, Rejected):
            assert (caught.value.status, caught.value.private_data) == (28, b"because")


@pytest.mark.transport("IB")
@pytest.mark.parametrize("step", [*QUERIES, "connect", "accept"])
async def test_abort_wakes_a_waiting_task(simulation: Simulation, step: str) -> None:
    async with waiting(simulation, step) as (cm_id, task):
        if step == "group":
            with pytest.raises(BusyError):
                await cm_id.join_multicast(parse_address("239.1.1.2"))
        cm_id.abort()
        cm_id.abort()
        with pytest.raises(LocalClosed, match="closed"):
            await task
        await loops.gather(cm_id.aclose(), cm_id.aclose())
        cm_id.handle_event(CmEvent(E.DEVICE_REMOVAL, 0))
        assert cm_id.state is S.CLOSED
        with pytest.raises(LocalClosed):
            await cm_id.handle.call(pytest.fail)


@pytest.mark.transport("IB")
@pytest.mark.loops("asyncio")  # a task on trio leaves the queue of waiters later
async def test_a_cancelled_wait_does_not_disturb_the_next_one(simulation: Simulation) -> None:
    """The next one begins before the cancelled task runs, and the event of the first one comes."""
    other = parse_address("239.1.1.2")
    async with waiting(simulation, "group") as (cm_id, task):
        simulation.world.after(1, simulation.cm.release)
        task.cancel()
        assert (await cm_id.join_multicast(other)).type is E.MULTICAST_JOIN
        assert task.cancelled()
        await cm_id.leave_multicast(other)


async def test_pre_destroy_hooks_run_before_the_destruction(simulation: Simulation) -> None:
    cm_id, called = await AsyncCmId.create(), Mock()
    called.two.side_effect = VerbsError(errno.EINVAL, "ibv_detach_mcast")
    simulation.world.calls.hooks["rdma_destroy_id"] = called.id
    for name in ("one", "two", "three"):
        cm_id.handle.add_pre_destroy_hook(name, getattr(called, name))
    for callback in (called.first, called.second):
        cm_id.handle.add_destroyed_callback(callback)
    cm_id.handle.add_released_callback(called.released)
    assert cm_id.handle.remove_pre_destroy_hook("one") is not None
    assert cm_id.handle.remove_pre_destroy_hook("one") is None
    await cm_id.aclose()
    order = ["three", "two", "id", "second", "first", "released"]
    assert [name for name, *_ in called.mock_calls] == order


async def test_callbacks_that_fail_do_not_hold_up_the_destruction(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id, called = await AsyncCmId.create(), Mock()
    for name in ("destroyed", "released"):
        add = getattr(cm_id.handle, f"add_{name}_callback")
        add(getattr(called, f"first_{name}"))
        add(Mock(side_effect=OSError(errno.EINVAL, f"{name} failed")))
    await loops.wait_for(cm_id.aclose(), 10)
    assert [name for name, *_ in called.mock_calls] == ["first_destroyed", "first_released"]
    assert "destroyed failed" in caplog.text
    assert "released failed" in caplog.text


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_destruction_waits_for_a_call(simulation: Simulation, is_cancelled: bool) -> None:
    async with listening(simulation):
        cm_id, calls = await resolved(simulation), simulation.world.calls
        calls.delay("rdma_connect", before=1)
        task = loops.create_task(connect(cm_id))
        await loops.sleep(0.5)
        if is_cancelled:
            await loops.cancel(task)
        cm_id.abort()
        await loops.sleep(0.25)
        assert calls.counts["rdma_destroy_id"] == 0
        if not is_cancelled:
            with pytest.raises(LocalClosed):
                await task
        await cm_id.aclose()
        assert calls.counts["rdma_destroy_id"] == 1


async def test_calls_that_can_take_long_run_in_a_pool_of_their_own(simulation: Simulation) -> None:
    with patch.object(blocking_pool, "submit", wraps=blocking_pool.submit) as block:
        cm_id = await resolved(simulation)
        assert not block.call_count
        with pytest.raises(Rejected):
            await connect(cm_id)
        await cm_id.aclose()
    assert block.call_count == (2 if simulation.near.is_iwarp else 0)


async def test_an_id_that_cannot_be_destroyed_is_logged(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id = await AsyncCmId.create()
    vanished = simulation.cm.id_of(cm_id)

    def fail() -> None:
        destroy(simulation.world, vanished)
        raise Failure(errno.EINVAL)

    simulation.world.calls.hooks["rdma_destroy_id"] = fail
    await cm_id.aclose()
    assert "an id could not be destroyed" in caplog.text


async def test_memory_of_a_queue_pair_that_is_not_destroyed_is_never_freed(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    cm_id, freed = await resolved(simulation), list[str]()
    await cm_id.create_qp(SMALL)
    cm_id.handle.add_destroyed_callback(lambda: freed.append("memory"))
    simulation.world.calls.fail("ibv_destroy_qp", errno.EBUSY)
    await cm_id.aclose()
    assert freed == []
    assert "a queue pair or its queues could not be destroyed" in caplog.text
    kept: Any = handle._undestroyed.pop()
    for callback in kept[2]:  # otherwise they are never called
        callback()
    simulation.exit_process()


async def test_a_wait_that_has_not_begun_ends_with_its_id(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        await cm_id.resolve_addr(steps.target(simulation))
        simulation.world.calls.delay("rdma_resolve_route", before=1)
        resolving = loops.create_task(cm_id.resolve_route())
        await loops.sleep(0.1)
        waiting = loops.create_task(cm_id.handle.wait(lambda interrupt: interrupt.is_set))
        await loops.sleep(0.1)
        cm_id.abort()
        for task in (resolving, waiting):
            with pytest.raises(LocalClosed):
                await task


@pytest.mark.parametrize("serialized", [False, True])
async def test_no_wait_begins_after_the_destruction(
    simulation: Simulation, serialized: bool
) -> None:
    cm_id = await resolved(simulation)
    await cm_id.aclose()
    with pytest.raises(LocalClosed):
        await cm_id.handle.wait(lambda interrupt: interrupt.is_set, serialized=serialized)


async def test_an_id_is_destroyed_even_if_no_thread_can_start(simulation: Simulation) -> None:
    cm_id = await AsyncCmId.create()
    with patch.object(WorkerPool, "_start", lambda pool: pool._jobs.popleft()()):
        task = loops.create_task(cm_id.resolve_addr(ABSENT))
        await loops.sleep(1)
        cm_id.abort()
        with pytest.raises(LocalClosed):
            await task
        await cm_id.aclose()


async def test_a_disconnect_that_fails_leaves_it_to_the_peer(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        simulation.world.calls.fail("rdma_disconnect", errno.EINVAL)
        active.start_disconnect()
        await loops.sleep(1)
        states = [active.state]
        passive.start_disconnect()
        await loops.sleep(1)
        states.append(active.state)
        assert states == [S.DISCONNECTING, S.DISCONNECTED]
    assert active.local_address == passive.peer_address


async def is_made_elsewhere(simulation: Simulation, is_synchronous: bool) -> bool:
    """Disconnect an id. Return True if another thread makes the call."""
    threads: list[int] = []
    calls = simulation.world.calls
    calls.hooks["rdma_disconnect"] = lambda: threads.append(threading.get_ident())
    async with connected(simulation) as (active, _):
        disconnecting = await active.migrate(None) if is_synchronous else active
        disconnecting.start_disconnect()
        await loops.sleep(1)
        await disconnecting.aclose()
    (thread,) = threads
    return thread != threading.get_ident()


@pytest.mark.transport("IB")
@pytest.mark.parametrize("is_synchronous", [False, True])
async def test_the_disconnect_of_a_synchronous_id_is_made_by_another_thread(
    simulation: Simulation, is_synchronous: bool
) -> None:
    assert await is_made_elsewhere(simulation, is_synchronous) is is_synchronous


@pytest.mark.transport("IWARP")
async def test_a_disconnect_on_iwarp_is_made_by_another_thread(simulation: Simulation) -> None:
    assert await is_made_elsewhere(simulation, is_synchronous=False)


async def test_a_completion_before_the_queue_is_armed_is_found(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        await steps.send_one(active, passive)
        for queue in simulation.world.all(CompletionQueue):  # the first poll finds nothing
            queue.pointer.hidden_until = queue.pointer.polls + 2
        assert (await passive.get_recv_comp()).check().byte_len == 16


@pytest.mark.transport("IB")
async def test_a_removal_while_a_datagram_request_is_accepted(simulation: Simulation) -> None:
    simulation.world.calls.delay("rdma_accept", after=1)
    async with listening(simulation, UDP) as listener, await resolved(simulation, UDP) as active:
        task = loops.create_task(active.connect(ConnectionParameters(qp_num=5)))
        async with await listener.get_request() as passive:
            simulation.world.after(0.5, lambda: simulation.cm.remove_device(simulation.far))
            with pytest.raises(DeviceRemoved):
                await passive.accept(ConnectionParameters(qp_num=17))
        await task


@pytest.mark.parametrize("seconds", [20, 40])
async def test_a_destruction_that_takes_long_is_logged(
    simulation: Simulation, caplog: pytest.LogCaptureFixture, seconds: int
) -> None:
    handle.slow_destruction_log = OccasionalLog(handle.logger)
    cm_id = await AsyncCmId.create()
    simulation.world.calls.delay("rdma_destroy_id", before=seconds)
    await cm_id.aclose()
    warned = ["an id is not destroyed after 30 s" in text for text in caplog.messages]
    assert warned == ([True] if seconds > handle.SLOW_DESTRUCTION_SECONDS else [])


async def test_a_step_after_a_removal_raises_the_removal(simulation: Simulation) -> None:
    async with await resolved(simulation) as active:
        simulation.cm.remove_device(simulation.near)
        await loops.sleep(1)
        for step in (active.connect, active.resolve_route):
            with pytest.raises(DeviceRemoved):
                await step()


async def test_a_request_that_is_closed_while_its_queue_pair_fails(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        passive = request.passive

        def close_and_fail() -> None:
            passive.abandon()
            raise Failure(errno.ENOMEM)

        simulation.world.calls.hooks["rdma_create_qp"] = close_and_fail
        with pytest.raises(LocalClosed):
            await accept(passive)
        del simulation.world.calls.hooks["rdma_create_qp"]


async def test_a_loop_without_free_descriptors_leaves_no_channel(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failure = Mock(side_effect=VerbsError(errno.EMFILE, "eventfd"))
        patch.setattr(cm_events, "CallReader", failure)
        with pytest.raises(VerbsError, match="eventfd"):
            await AsyncCmId.create()
        assert simulation.left() == {}
    await (await AsyncCmId.create()).aclose()
