"""AsyncCmId: events before, during and after a wait; cancelling, failing and closing."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator import ids as steps
from simulator.cm import destroy
from simulator.ids import PORT, SMALL, accept, connect, connected, listening, requested, resolved
from simulator.world import Failure

from aiordma import (
    AddressError,
    BusyError,
    ConnectError,
    DeviceRemoved,
    LocalClosed,
    PeerClosed,
    RdmaError,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
)
from aiordma.cm import AsyncCmId, CmState, handle
from aiordma.enums import CmEventType, IdOption, PortSpace, QpState, SrqType
from aiordma.loop import blocking_pool
from aiordma.loop.workers import WorkerPool
from aiordma.rdmacm import CmEvent, ConnectionParameters, Ece, SocketAddress, parse_address
from aiordma.rdmacm.route import pack_path_data
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    ProtectionDomain,
    QueuePair,
    QueuePairCaps,
    QueuePairInit,
    SharedReceiveQueueCaps,
)

E, S = CmEventType, CmState
ABSENT = parse_address("10.9.9.9", PORT)
GROUP, OTHER_GROUP = parse_address("239.1.1.1"), parse_address("239.1.1.2")
FAR = "10.0.0.2"


def state_of(cm_id: AsyncCmId) -> CmState:
    """Return `cm_id.state`. mypy takes the attribute for unchanged after an assertion."""
    return cm_id.state


async def cancel(task: loops.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(loops.CancelledError):
        await task


# --- resolving and connecting ---


async def test_ids_connect_step_by_step(simulation: Simulation) -> None:
    async with listening(simulation) as listener, await AsyncCmId.create() as active:
        seen: list[CmState] = []
        active.on_change = lambda: seen.append(active.state)
        assert (active.local_address, active.peer_address, active.port_num) == (("", 0),) * 2 + (0,)
        await active.resolve_addr(steps.target(simulation))
        await active.resolve_route()
        connecting = loops.create_task(connect(active, b"hello"))
        async with await listener.get_request() as passive:
            assert passive.event is not None
            assert passive.event.private_data.rstrip(b"\0") == b"hello"
            await accept(passive, b"welcome")
            await connecting
            assert active.established is not None
            assert active.established.private_data.rstrip(b"\0") == b"welcome"
            assert (active.peer_address, passive.peer_address) == (
                (FAR, PORT),
                active.local_address,
            )
            assert active.device().name == "sim0"
            assert active.port_num == 1
            assert active.route.dgid.endswith(bytes([10, 0, 0, 2]))
            await active.disconnect()
            await passive.disconnect()
            assert passive.state is S.DISCONNECTED
    assert seen == [S.ADDR_RESOLVED, S.ROUTE_RESOLVED, S.CONNECTED, S.DISCONNECTED, S.CLOSED]
    assert active.peer_address == (FAR, PORT)


@pytest.mark.parametrize("call", ["rdma_resolve_route", "rdma_connect"])
async def test_an_event_can_arrive_before_its_call_returns(
    simulation: Simulation, call: str
) -> None:
    simulation.world.calls.delay(call, after=0.5)
    async with connected(simulation) as (active, passive):
        assert (active.state, passive.state) == (S.CONNECTED, S.CONNECTED)


@pytest.mark.parametrize("moment", ["before the event", "with the event"])
async def test_an_event_is_not_lost_with_a_cancelled_waiter(
    simulation: Simulation, moment: str
) -> None:
    async with await AsyncCmId.create() as cm_id:
        simulation.cm.hold(E.ADDR_RESOLVED)
        task = loops.create_task(cm_id.resolve_addr(steps.target(simulation)))
        await loops.sleep(1)
        if moment == "with the event":
            cm_id.on_change = lambda: (task.cancel(), None)[1]
        else:
            await cancel(task)
        simulation.cm.release()
        await loops.wait([task])
        await loops.sleep(1)
        cm_id.on_change = None
        assert cm_id.state is S.ADDR_RESOLVED
        await cm_id.resolve_route()


async def test_a_hint_does_not_end_a_wait(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        simulation.cm.hold(E.ADDR_RESOLVED)
        task = loops.create_task(cm_id.resolve_addr(steps.target(simulation)))
        await loops.sleep(0.1)
        for kind in (E.ADDR_CHANGE, E.TIMEWAIT_EXIT, CmEventType(99)):
            simulation.cm.put(cm_id, kind)
            await loops.sleep(0.1)
        assert not task.done()
        simulation.cm.release()
        await task


async def test_a_failed_query_can_be_repeated(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        with pytest.raises(AddressError, match=r"no RDMA path to 10\.9\.9\.9: .*timed out"):
            await cm_id.resolve_addr(ABSENT)
        await cm_id.resolve_addr(steps.target(simulation))


async def test_a_call_that_fails_leaves_the_state_unchanged(simulation: Simulation) -> None:
    fail = simulation.world.calls.fail
    async with await AsyncCmId.create() as cm_id:
        fail("rdma_bind_addr", errno.EADDRINUSE)
        with pytest.raises(VerbsError, match="port is in use"):
            cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        fail("rdma_resolve_addr", errno.ENODEV)
        with pytest.raises(AddressError, match="aiordma devices") as caught:
            await cm_id.resolve_addr(steps.target(simulation))
        assert isinstance(caught.value.__cause__, VerbsError)
        assert cm_id.state is S.IDLE
        cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        assert state_of(cm_id) is S.ADDR_BOUND
        await cm_id.resolve_addr(steps.target(simulation))
        fail("rdma_resolve_route", errno.EINVAL)
        with pytest.raises(RouteError, match="Invalid argument"):
            await cm_id.resolve_route()
        assert state_of(cm_id) is S.ADDR_RESOLVED


@pytest.mark.transport("IB")
async def test_a_path_that_is_known_replaces_resolve_route(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        await cm_id.resolve_addr(steps.target(simulation))
        with pytest.raises(RouteError):
            await cm_id.set_path(b"too short")
        await cm_id.set_path(pack_path_data([]))
        assert cm_id.state is S.ROUTE_RESOLVED


# --- failing to connect ---


@pytest.mark.transport("IB")
@pytest.mark.parametrize(
    ("kind", "status", "error", "text"),
    [
        (E.REJECTED, 28, Rejected, r"10\.0\.0\.2:7471 rejected .* application refused"),
        (E.UNREACHABLE, -errno.ETIMEDOUT, Unreachable, r"10\.0\.0\.2:7471 does not answer"),
        (E.CONNECT_ERROR, -errno.EIO, ConnectError, r"could not connect to 10\.0\.0\.2:7471"),
        (E.DEVICE_REMOVAL, 0, DeviceRemoved, "device was removed"),
        (E.ADDR_RESOLVED, 0, RdmaError, "unexpected ADDR_RESOLVED event"),
    ],
)
async def test_the_first_error_event_while_connecting_is_raised(
    simulation: Simulation, kind: CmEventType, status: int, error: type[RdmaError], text: str
) -> None:
    simulation.cm.unreachable.add(FAR)
    async with await resolved(simulation) as cm_id:
        task = loops.create_task(connect(cm_id))
        await loops.sleep(1)
        simulation.cm.put(cm_id, kind, status=status, private_data=b"because")
        simulation.cm.put(cm_id, E.CONNECT_ERROR)
        with pytest.raises(error, match=text) as caught:
            await task
        assert type(caught.value) is error
        if isinstance(caught.value, Rejected):
            assert (caught.value.status, caught.value.private_data) == (status, b"because")


async def test_without_a_listener_connecting_is_rejected(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        with pytest.raises(Rejected):
            await connect(cm_id)


async def test_a_machine_that_does_not_answer_is_unreachable(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        simulation.cm.unreachable.add(FAR)
        with pytest.raises(Unreachable):
            await connect(cm_id)


@pytest.mark.transport("IB")
async def test_prepare_is_called_before_the_c_call(simulation: Simulation) -> None:
    calls = simulation.world.calls
    async with await resolved(simulation) as cm_id:
        calls.fail("rdma_connect", errno.EINVAL)
        with pytest.raises(VerbsError, match="rdma_connect"):
            await connect(cm_id)
        assert calls.log.index("rdma_create_qp") < calls.log.index("rdma_connect")
        with pytest.raises(ZeroDivisionError):
            await cm_id.connect(None, lambda: 1 // 0)  # type: ignore[arg-type]
        assert calls.counts["rdma_connect"] == 1


# --- calls that are not allowed ---


async def test_a_second_call_is_refused_while_one_is_under_way(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        simulation.cm.hold(E.ADDR_RESOLVED)
        task = loops.create_task(cm_id.resolve_addr(steps.target(simulation)))
        await loops.sleep(1)
        with pytest.raises(RdmaError, match="not possible in state ADDR_QUERY"):
            await cm_id.resolve_addr(steps.target(simulation))
        simulation.cm.release()
        await task


def calls_of(cm_id: AsyncCmId) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    async def bind_addr() -> None:
        cm_id.bind_addr(ABSENT)

    async def listen() -> None:
        cm_id.listen()

    return {
        "bind_addr": bind_addr,
        "resolve_addr": lambda: cm_id.resolve_addr(ABSENT),
        "resolve_route": cm_id.resolve_route,
        "connect": lambda: cm_id.connect(),
        "listen": listen,
        "accept": lambda: cm_id.accept(),
    }


async def test_calls_in_the_wrong_state_raise_and_are_not_made(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        made = len(simulation.world.calls.log)
        for name, call in calls_of(active).items():
            with pytest.raises(RdmaError, match=name):
                await call()
        assert len(simulation.world.calls.log) == made
        await passive.disconnect()
        for name, call in calls_of(active).items():
            with pytest.raises(PeerClosed, match=name):
                await call()
        with pytest.raises(RdmaError):
            active.establish()
    for name, call in calls_of(active).items():
        with pytest.raises(LocalClosed, match=name):
            await call()


# --- listening ---


async def test_requests_are_returned_in_order_and_none_is_lost(simulation: Simulation) -> None:
    async with listening(simulation) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1e-6)
        with pytest.raises(BusyError):
            await listener.get_request()
        peers = [await resolved(simulation) for _ in range(3)]
        tasks = []
        for number, peer in enumerate(peers):
            tasks.append(loops.create_task(connect(peer, b"%d" % number)))
            await loops.sleep(0.1)
            if not number:
                first = await waiting
                waiting = loops.create_task(listener.get_request())
                await loops.sleep(1e-6)
                listener.on_change = waiting.cancel  # type: ignore[assignment]
        await loops.wait([waiting])
        listener.on_change = None
        requests = [first] + ([] if waiting.cancelled() else [waiting.result()])
        while len(requests) < 3:
            requests.append(await listener.get_request())
        for number, request in enumerate(requests):
            assert request.event is not None
            assert request.event.private_data.rstrip(b"\0") == b"%d" % number
            request.reject()
            await request.aclose()
        outcomes = await loops.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Rejected] * 3
        for peer in peers:
            await peer.aclose()


async def test_requests_beyond_the_backlog_are_rejected(simulation: Simulation) -> None:
    async with listening(simulation, backlog=2) as listener:
        peers = [await resolved(simulation) for _ in range(4)]
        tasks = []
        for peer in peers:
            tasks.append(loops.create_task(connect(peer)))
            await loops.sleep(0.1)
        assert [task.done() for task in tasks] == [False, False, True, True]
        await (await listener.get_request()).aclose()
        await listener.aclose()  # rejects the request that no task has taken
        outcomes = await loops.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Rejected] * 4
        for peer in peers:
            await peer.aclose()


async def test_a_request_whose_device_was_removed_is_skipped(simulation: Simulation) -> None:
    async with listening(simulation) as listener:
        peers = [await resolved(simulation) for _ in range(2)]
        tasks = []
        for data, peer in zip((b"removed", b"present"), peers, strict=True):
            tasks.append(loops.create_task(connect(peer, data)))
            await loops.sleep(0.1)
        simulation.world.calls.fail("rdma_migrate_id", errno.ENXIO)
        async with await listener.get_request() as request:
            assert request.event is not None
            assert request.event.private_data.rstrip(b"\0") == b"present"
        outcomes = await loops.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Rejected] * 2
        for peer in peers:
            await peer.aclose()


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


async def test_a_removed_device_ends_the_wait_for_requests(simulation: Simulation) -> None:
    async with listening(simulation) as listener:
        task = loops.create_task(listener.get_request())
        await loops.sleep(1)
        simulation.cm.remove_device(simulation.far)
        with pytest.raises(DeviceRemoved):
            await task
    with pytest.raises(LocalClosed):
        await listener.get_request()
    assert [request async for request in listener] == []


# --- accepting ---


async def test_a_request_that_cannot_be_accepted_has_failed(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        simulation.world.calls.fail("rdma_accept", errno.EINVAL)
        with pytest.raises(ConnectError, match=r"10\.0\.0\.1:\d+ could not be accepted"):
            await accept(request.passive)
        assert request.passive.state is S.FAILED


async def test_a_failure_to_prepare_rejects_the_request(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        simulation.world.calls.fail("rdma_create_qp", errno.ENOMEM)
        with pytest.raises(VerbsError, match="rdma_create_qp"):
            await accept(request.passive)
        with pytest.raises(Rejected):
            await request.connecting


async def test_a_failure_to_prepare_after_the_peer_gave_up_is_a_connect_error(
    simulation: Simulation,
) -> None:
    async with requested(simulation) as request:
        await request.active.aclose()
        await loops.sleep(1)
        simulation.world.calls.fail("rdma_create_qp", errno.EINVAL)
        with pytest.raises(ConnectError, match="gave up before it was accepted"):
            await accept(request.passive)


@pytest.mark.transport("IB")
@pytest.mark.parametrize("side", ["active", "passive"])
@pytest.mark.parametrize("kinds", [[E.ESTABLISHED, E.DISCONNECTED], [E.DISCONNECTED]], ids=len)
async def test_a_peer_that_disconnects_at_once_was_connected(
    simulation: Simulation, side: str, kinds: list[CmEventType]
) -> None:
    """Messages that the peer sent before can still be received."""
    async with requested(simulation) as request:
        simulation.cm.hold(E.ESTABLISHED)
        accepting = loops.create_task(accept(request.passive))
        await loops.sleep(1)
        cm_id, task = {
            "active": (request.active, request.connecting),
            "passive": (request.passive, accepting),
        }[side]
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
        request.passive.abort()
        await loops.wait([accepting])


@pytest.mark.parametrize("kind", [E.REJECTED, E.UNREACHABLE, E.CONNECT_ERROR])
async def test_a_peer_that_does_not_confirm_is_a_connect_error(
    simulation: Simulation, kind: CmEventType
) -> None:
    async with requested(simulation) as request:
        simulation.cm.hold(E.ESTABLISHED)
        accepting = loops.create_task(accept(request.passive))
        await loops.sleep(1)
        simulation.cm.put(request.passive, kind)
        with pytest.raises(ConnectError):
            await accepting


async def test_a_request_is_rejected_once(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        request.passive.check_unanswered()
        request.passive.reject(b"no")
        assert request.passive.state is S.REFUSED
        with pytest.raises(Rejected) as caught:
            await request.connecting
        assert caught.value.private_data.rstrip(b"\0") == b"no"
        for again in (request.passive.reject, request.passive.check_unanswered):
            with pytest.raises(LocalClosed):
                again()


async def test_rejecting_a_peer_that_gave_up_is_no_error(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        await request.active.aclose()
        await loops.sleep(1)
        request.passive.reject()
        assert request.passive.state is S.REFUSED


@pytest.mark.parametrize(
    ("kind", "cause"), [(E.REJECTED, type(None)), (E.DEVICE_REMOVAL, DeviceRemoved)]
)
async def test_a_request_that_has_failed_raises_connect_error(
    simulation: Simulation, kind: CmEventType, cause: type[RdmaError | None]
) -> None:
    async with requested(simulation) as request:
        request.passive.handle_event(CmEvent(kind, 0, status=4))
        with pytest.raises(ConnectError, match=r"10\.0\.0\.1:") as caught:
            request.passive.check_unanswered()
        assert type(caught.value.__cause__) is cause
        assert request.passive.state is S.CLOSED
        with pytest.raises(LocalClosed, match="answered already"):
            request.passive.check_unanswered()


# --- queue pairs of the user ---


@pytest.mark.transport("IB")
async def test_queue_pairs_that_the_user_moves_are_connected(simulation: Simulation) -> None:
    async with requested(simulation) as request:
        request.active.abort()
        await loops.wait([request.connecting])
    async with listening(simulation) as listener, await resolved(simulation) as active:
        objects: list[Any] = []
        near = make_queue_pair(active, objects)
        near.modify(active.init_qp_attr(QpState.INIT))
        connecting = loops.create_task(
            active.connect(ConnectionParameters(b"", 1, 1, qp_num=near.number))
        )
        async with await listener.get_request() as passive:
            assert passive.event is not None
            assert passive.event.qp_num == near.number
            far = make_queue_pair(passive, objects)
            for state in (QpState.INIT, QpState.RTR, QpState.RTS):
                far.modify(passive.init_qp_attr(state))
            accepting = loops.create_task(
                passive.accept(ConnectionParameters(b"", 1, 1, qp_num=far.number))
            )
            await connecting
            assert active.state is S.RESPONDED
            for state in (QpState.RTR, QpState.RTS):
                near.modify(active.init_qp_attr(state))
            active.establish()
            await accepting
            assert (state_of(active), passive.state) == (S.CONNECTED, S.CONNECTED)
            near.destroy()
            far.destroy()
    for thing in reversed(objects):
        thing.close()


def make_queue_pair(cm_id: AsyncCmId, objects: list[Any]) -> QueuePair:
    """Make a queue pair, and append to `objects` what it needs."""
    pd, channel = ProtectionDomain(cm_id.device()), CompletionChannel(cm_id.device())
    cq = CompletionQueue(channel, 16)
    objects += [pd, channel, cq]
    return QueuePair.create(pd, QueuePairInit(QueuePairCaps(1, 1), cq, cq))


@pytest.mark.transport("IB")
async def test_ece_options_are_offered_and_can_be_rejected(simulation: Simulation) -> None:
    ece = Ece(vendor_id=0x15B3, options=5, comp_mask=1)
    async with listening(simulation) as listener, await resolved(simulation) as active:
        active.set_local_ece(ece)
        connecting = loops.create_task(connect(active))
        async with await listener.get_request() as passive:
            assert passive.remote_ece() == ece
            passive.reject(ece=True)
            with pytest.raises(Rejected, match="ECE"):
                await connecting
        with pytest.raises(VerbsError):
            active.set_local_ece(ece)


async def test_options_reach_librdmacm(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        cm_id.set_option(IdOption.TOS, 32)
        assert list(simulation.cm.id_of(cm_id).options.values()) == [32]


async def test_a_shared_receive_queue_is_destroyed_with_its_id(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        caps = SharedReceiveQueueCaps(4, 1)
        with pytest.raises(VerbsError, match="rdma_create_srq_ex"):
            await cm_id.create_srq(caps, srq_type=SrqType.XRC)
        srq = await cm_id.create_srq(caps)
        await cm_id.create_qp(SMALL)
        assert srq.caps.max_wr == 4


# --- multicast ---


@pytest.mark.transport("IB")
async def test_closing_an_id_leaves_its_groups(simulation: Simulation) -> None:
    cm_id = await AsyncCmId.create(PortSpace.UDP)
    cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
    await cm_id.create_qp(SMALL)
    tasks = [loops.create_task(cm_id.join_multicast(GROUP))]
    await loops.sleep(1e-6)
    with pytest.raises(BusyError):
        await cm_id.join_multicast(OTHER_GROUP)
    event = await tasks[0]
    assert (event.type, event.qp_num) == (E.MULTICAST_JOIN, 0xFFFFFF)
    with pytest.raises(RdmaError, match="datagrams have no connection"):
        await cm_id.disconnect()
    with pytest.raises(VerbsError, match="rdma_leave_multicast"):
        await cm_id.leave_multicast(OTHER_GROUP)
    assert (await cm_id.join_multicast(OTHER_GROUP)).type is E.MULTICAST_JOIN
    await cm_id.leave_multicast(GROUP)
    await cm_id.aclose()
    log = simulation.world.calls.log
    assert log.count("rdma_leave_multicast") == 3
    assert log.index("rdma_destroy_id") > len(log) - log[::-1].index("rdma_leave_multicast") - 1


@pytest.mark.transport("IB")
@pytest.mark.parametrize("kind", [E.MULTICAST_ERROR, E.DEVICE_REMOVAL])
async def test_a_group_that_cannot_be_joined_raises(
    simulation: Simulation, kind: CmEventType
) -> None:
    async with await AsyncCmId.create(PortSpace.UDP) as cm_id:
        cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        simulation.cm.hold(E.MULTICAST_JOIN)
        task = loops.create_task(cm_id.join_multicast(GROUP))
        await loops.sleep(1)
        if kind is E.MULTICAST_ERROR:
            simulation.datagrams.end_membership(GROUP.host)
        else:
            simulation.cm.remove_device(simulation.near)
        with pytest.raises((ConnectError, DeviceRemoved)):
            await task


@pytest.mark.transport("IWARP")
async def test_iwarp_has_no_groups(simulation: Simulation) -> None:
    async with await AsyncCmId.create(PortSpace.UDP) as cm_id:
        cm_id.bind_addr(SocketAddress(simulation.near.host, 0))
        with pytest.raises(VerbsError, match="rdma_join_multicast"):
            await cm_id.join_multicast(GROUP)


async def test_pre_destroy_hooks_run_before_the_destruction(simulation: Simulation) -> None:
    cm_id, order = await AsyncCmId.create(), list[str]()
    simulation.world.calls.hooks["rdma_destroy_id"] = lambda: order.append("id")

    def fail() -> None:
        order.append("fail")
        raise VerbsError(errno.EINVAL, "ibv_detach_mcast")

    hooks = cm_id.handle
    hooks.add_pre_destroy_hook("one", lambda: order.append("one"))
    hooks.add_pre_destroy_hook("two", fail)
    hooks.add_pre_destroy_hook("three", lambda: order.append("three"))
    hooks.add_destroyed_callback(lambda: order.append("first"))
    hooks.add_destroyed_callback(lambda: order.append("second"))
    hooks.add_released_callback(lambda: order.append("released"))
    assert hooks.remove_pre_destroy_hook("one") is not None
    assert hooks.remove_pre_destroy_hook("one") is None
    await cm_id.aclose()
    assert order == ["three", "fail", "id", "second", "first", "released"]


# --- the end ---


@pytest.mark.transport("IB")
@pytest.mark.parametrize("step", ["address", "route", "connect", "accept", "request"])
async def test_abort_wakes_a_waiting_task(simulation: Simulation, step: str) -> None:
    async with listening(simulation) as listener:
        cm_id = await AsyncCmId.create()
        simulation.cm.hold(E.ESTABLISHED)
        if step in ("connect", "accept"):
            await cm_id.aclose()
            cm_id = await resolved(simulation)
        elif step == "route":
            simulation.cm.hold(E.ROUTE_RESOLVED)
            await cm_id.resolve_addr(steps.target(simulation))
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "address": lambda: cm_id.resolve_addr(ABSENT),
            "route": cm_id.resolve_route,
            "connect": lambda: connect(cm_id),
            "accept": lambda: connect(cm_id),
            "request": listener.get_request,
        }
        task = loops.create_task(calls[step]())
        await loops.sleep(1)
        if step == "accept":
            connecting, active = task, cm_id
            cm_id = await listener.get_request()
            task = loops.create_task(accept(cm_id))
            await loops.sleep(1)
        (listener if step == "request" else cm_id).abort()
        with pytest.raises(LocalClosed, match="closed"):
            await task
        await cm_id.aclose()
        if step == "accept":
            await active.aclose()
            await loops.wait([connecting])


async def test_closing_twice_destroys_once(simulation: Simulation) -> None:
    cm_id = await AsyncCmId.create()
    cm_id.abort()
    cm_id.abort()
    await loops.gather(cm_id.aclose(), cm_id.aclose())
    assert simulation.world.calls.counts["rdma_destroy_id"] == 1
    cm_id.handle_event(CmEvent(E.DEVICE_REMOVAL, 0))
    assert cm_id.state is S.CLOSED


async def test_cancelling_aclose_does_not_stop_it(simulation: Simulation) -> None:
    cm_id = await AsyncCmId.create()
    simulation.world.calls.delay("rdma_destroy_id", before=1)
    task = loops.create_task(cm_id.aclose())
    await loops.sleep(0.5)
    await cancel(task)
    await cm_id.aclose()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_destruction_waits_for_the_call_under_way(
    simulation: Simulation, is_cancelled: bool
) -> None:
    async with listening(simulation):
        cm_id, calls = await resolved(simulation), simulation.world.calls
        calls.delay("rdma_connect", before=1)
        task = loops.create_task(connect(cm_id))
        await loops.sleep(0.5)
        if is_cancelled:
            await cancel(task)
        cm_id.abort()
        await loops.sleep(0.25)
        assert calls.counts["rdma_destroy_id"] == 0
        if not is_cancelled:
            with pytest.raises(LocalClosed):
                await task
        await cm_id.aclose()
        assert calls.counts["rdma_destroy_id"] == 1


async def test_calls_that_can_take_long_run_in_the_blocking_pool(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[object] = []
    submit = blocking_pool.submit

    def record(job: Callable[[], None]) -> None:
        jobs.append(job)
        submit(job)

    monkeypatch.setattr(blocking_pool, "submit", record)
    cm_id = await resolved(simulation)
    assert len(jobs) == 1  # the route
    with pytest.raises(Rejected):
        await connect(cm_id)
    await cm_id.aclose()
    assert len(jobs) == (3 if simulation.near.is_iwarp else 1)


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


async def test_starting_to_disconnect_twice_disconnects_once(simulation: Simulation) -> None:
    async with connected(simulation) as (active, passive):
        active.start_disconnect()
        active.start_disconnect()
        assert active.state is S.DISCONNECTING
        await loops.sleep(1)
        assert simulation.world.calls.counts["rdma_disconnect"] == 1
        assert (state_of(active), passive.state) == (S.DISCONNECTED, S.DISCONNECTED)


async def test_an_id_that_is_dropped_warns_and_is_destroyed(simulation: Simulation) -> None:
    ids = [await AsyncCmId.create()]
    with pytest.warns(ResourceWarning, match="unclosed <AsyncCmId IDLE"):
        ids.clear()


async def test_no_call_is_made_after_destruction_has_begun(simulation: Simulation) -> None:
    cm_id, made = await AsyncCmId.create(), list[None]()
    cm_id.abort()
    for _ in range(2):
        with pytest.raises(LocalClosed):
            await cm_id.handle.call(lambda: made.append(None))
        await cm_id.aclose()
    assert made == []


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


async def test_an_id_is_destroyed_even_if_no_thread_can_start(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    cm_id = await AsyncCmId.create()
    with monkeypatch.context() as patch:  # ends before the simulation restores the method
        patch.setattr(WorkerPool, "_start", lambda pool: pool._jobs.popleft()())
        task = loops.create_task(cm_id.resolve_addr(ABSENT))
        await loops.sleep(1)
        cm_id.abort()
        with pytest.raises(LocalClosed):
            await task
        await cm_id.aclose()
