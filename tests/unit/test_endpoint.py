"""Endpoint: what ends a connection, the first message on iWARP, and what cannot be destroyed."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock
from unittest.mock import Mock

import helpers
import loops
import pytest
from simulator import Simulation, ids
from simulator.cm import Id
from simulator.ids import PORT, resolved
from simulator.network import RequestFailed
from simulator.pairs import CtrlC, connected
from simulator.world import Failure, lib
from stream_sides import Script, settings
from streaming import streaming

import aiordma
from aiordma import (
    AccessFlags,
    ConnectionOptions,
    DeviceRemoved,
    LocalClosed,
    PeerClosed,
    ProtocolError,
    Rejected,
    VerbsError,
)
from aiordma.cm import AsyncCmId, CmState
from aiordma.dispatch import loop_device
from aiordma.enums import AsyncEventType, CmEventType
from aiordma.loop import running_loop
from aiordma.qp.endpoint import FLUSH_SECONDS, Endpoint
from aiordma.qp.first_message import FIRST_MESSAGE_SECONDS, SIW_FIRST_MESSAGE_SECONDS
from aiordma.verbs import AsyncEvent
from aiordma.verbs.device import SIW_VENDOR_ID

LEFT = "a resource could not be destroyed"


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


async def test_a_disconnect_that_has_arrived_is_the_cause_of_a_failure(
    simulation: Simulation,
) -> None:
    """A busy loop can run timers before it reads the events: uvloop does that."""
    async with connected(simulation) as pair:
        active = pair.near.connection
        endpoint = active._endpoint
        endpoint.queue_pair_event(AsyncEvent("sim0", AsyncEventType.QP_FATAL))
        assert not active.closed
        pair.far.connection.abort()
        simulation.world.settle(0.1)  # the loop reads nothing
        assert endpoint._failure_timer is not None
        endpoint._failure_timer.expire()
        with pytest.raises(PeerClosed):
            await active.recv()


async def test_the_first_operation_after_the_end_raises_its_cause(simulation: Simulation) -> None:
    """The id is closed by then, because a request was in flight."""
    async with connected(simulation) as pair:
        connection, remote = pair.near.connection, aiordma.RemoteBuffer(1, 1, 10)
        async with await connection.allocate(10) as region:
            pair.near.hold()
            await connection.send(b"in flight")
            endpoint = connection._endpoint
            simulation.cm.put(endpoint.cm, CmEventType.DEVICE_REMOVAL, status=-errno.EIO)
            await loops.until(lambda: endpoint.cm.state is CmState.CLOSED, "the id to be closed")
            operations: list[Callable[[], Awaitable[object]]] = [
                lambda: connection.send(b"x"),
                lambda: connection.send(b"x", invalidate=remote),
                lambda: connection.read(remote, region),
                lambda: connection.write(region, remote),
            ]
            for operation in operations:
                with pytest.raises(DeviceRemoved):
                    await operation()


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


@pytest.mark.transport("IB")
async def test_memory_that_is_never_flushed_is_released_after_the_end(
    simulation: Simulation,
) -> None:
    """The user need not close the connection before. Messages that had arrived are there still."""
    async with connected(simulation) as pair:
        simulation.network.loses_flushes = True
        connection = pair.near.connection
        region = await connection.allocate(100)
        pair.near.qp.allowed = 0  # nothing completes
        task = loops.create_task(connection.read(aiordma.RemoteBuffer(1, 1, 100), region))
        for message in (b"last", b"but one"):
            await pair.far.connection.send(message)
        await loops.sleep(1)
        held = await connection.recv_message()
        pair.far.connection.abort()
        with pytest.raises(PeerClosed):
            await task
        await region.aclose()
        assert bytes(held.data) == b"last"
        assert await connection.recv() == b"but one"
        held.release()
        with pytest.raises(PeerClosed):
            await connection.recv()


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize(
    ("is_siw", "has_received", "probes"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
async def test_only_siw_without_a_received_message_is_probed(
    simulation: Simulation, is_siw: bool, has_received: bool, probes: int
) -> None:
    simulation.far.vendor_id = SIW_VENDOR_ID * is_siw
    async with helpers.connected(simulation.far) as pair:
        pair.server._endpoint.data_path.probe = probe = Mock()  # type: ignore[method-assign]
        if has_received:
            await pair.client.send(b"first")
        await loops.sleep(1)
        assert probe.call_count == probes
        await pair.server.send(b"answer")
        assert await pair.client.recv() == b"answer"


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("is_siw", [True, False])
@pytest.mark.parametrize("sends_first", [True, False])
async def test_the_accepting_side_sends_after_the_first_message_or_a_short_time(
    simulation: Simulation, sends_first: bool, is_siw: bool
) -> None:
    simulation.far.vendor_id = SIW_VENDOR_ID * is_siw
    limit = SIW_FIRST_MESSAGE_SECONDS if is_siw else FIRST_MESSAGE_SECONDS
    async with helpers.connected(simulation.far) as pair:
        begun = simulation.world.now
        task = loops.create_task(pair.server.send(b"answer"))
        await loops.sleep(0.001)
        assert not task.done()
        if sends_first:
            await pair.client.send(b"first")
        await task
        took = simulation.world.now - begun
        assert took < limit / 2 if sends_first else limit / 2 < took < 2 * limit


@pytest.mark.transport("IB")
@pytest.mark.parametrize("connect", [helpers.connected, streaming])
async def test_the_first_message_of_an_established_connection_is_not_reported(
    simulation: Simulation, connect: Any
) -> None:
    async with connect(simulation.far) as pair:
        for connection in (pair.client, pair.server):
            connection._endpoint.message_arrived = pytest.fail
        await pair.client.send(b"first")
        assert await anext(pair.server) == b"first"
        await pair.server.send(b"answer")
        assert await anext(pair.client) == b"answer"


@pytest.mark.transport("IWARP")
async def test_an_aborted_endpoint_does_not_resume_sends(simulation: Simulation) -> None:
    """The first message or its timeout can come while the queue pair is being destroyed."""
    async with helpers.connected(simulation.far) as pair:
        endpoint = pair.server._endpoint
        endpoint.data_path.resume = pytest.fail  # type: ignore[method-assign]
        pair.server.abort()
        endpoint.message_arrived()
        endpoint._first_message._on_timeout()


@pytest.mark.transport("IWARP")
@pytest.mark.parametrize("connect", [helpers.connected, streaming])
async def test_a_refused_probe_ends_the_connection(simulation: Simulation, connect: Any) -> None:
    simulation.far.vendor_id = SIW_VENDOR_ID
    async with connect(simulation.far) as pair:
        for qp in simulation.queue_pairs():
            qp.pointer.sends.refusal = errno.EINVAL
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await anext(pair.server)


@pytest.mark.parametrize("kind", ["", "_stream"])
async def test_a_dropped_connection_warns_and_is_destroyed(
    simulation: Simulation, kind: str
) -> None:
    listen, connect = (getattr(aiordma, f"{name}{kind}") for name in ("listen", "connect"))
    async with listen(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        ends = [await connect(simulation.far.host, PORT)]
        async with await accepting:
            with pytest.warns(ResourceWarning, match=f"unclosed <.* port {PORT}, open>"):
                ends.clear()


@pytest.mark.transport("IB")
async def test_a_timer_that_cannot_be_set_is_ignored(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    simulation.world.calls.fail("ibv_modify_qp", errno.EINVAL)
    async with helpers.connected(simulation.far) as pair:
        await pair.client.send(b"hello")
        assert await pair.server.recv() == b"hello"
    assert "ignored: " in caplog.text


@pytest.mark.transport("IB")
async def test_a_disconnect_without_confirmation_ends_a_connection(simulation: Simulation) -> None:
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


async def test_a_failure_at_the_moment_of_establishing_is_raised_by_the_connection(
    simulation: Simulation,
) -> None:
    """A malformed message can arrive with the peer's confirmation, before accept() returns."""
    on_cm_change = Endpoint._on_cm_change

    def fail(endpoint: Endpoint[Any]) -> None:
        on_cm_change(endpoint)
        if endpoint.cm.state is CmState.CONNECTED:
            endpoint.fail(ProtocolError("malformed"))

    with mock.patch.object(Endpoint, "_on_cm_change", fail):
        async with helpers.connected(simulation.far) as pair:
            for end in (pair.client, pair.server):
                with pytest.raises(ProtocolError, match="malformed"):
                    await end.recv()


@pytest.mark.transport("IWARP")
async def test_a_flushed_read_waits_for_the_reason(simulation: Simulation) -> None:
    """The kernel flushes the requests before it reports that the peer has disconnected."""
    simulation.cm.hold(CmEventType.DISCONNECTED)
    writable = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    async with helpers.connected(simulation.far) as pair:
        theirs = await pair.server.allocate(10, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)
        ours = await pair.client.allocate(10, writable)
        for qp in simulation.queue_pairs():
            qp.allowed = 0
        reading = loops.create_task(pair.client.read(theirs.remote, ours))
        await loops.sleep(1)
        pair.server.abort()
        await loops.sleep(0.001)
        assert not reading.done()
        simulation.cm.release()
        with pytest.raises(PeerClosed):
            await reading


@pytest.mark.transport("IWARP")
async def test_a_send_that_ended_with_tcp_waits_for_the_reason(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that siw sends when the TCP connection ends fails before the disconnect."""
    simulation.cm.hold(CmEventType.DISCONNECTED)
    async with helpers.connected(simulation.far) as pair:
        failed = mock.Mock(side_effect=RequestFailed(lib.IBV_WC_LOC_QP_OP_ERR))
        monkeypatch.setattr(simulation.world.network, "_execute", failed)
        receiving = loops.create_task(pair.client.recv())
        await pair.client.send(b"not sent")
        await loops.sleep(0.001)
        pair.server.abort()
        await loops.sleep(0.001)
        assert failed.called
        assert not receiving.done()
        simulation.cm.release()
        with pytest.raises(PeerClosed):
            await receiving


@pytest.mark.transport("IB")
async def test_a_flushed_receive_waits_for_the_reason(simulation: Simulation) -> None:
    """librdmacm can flush the receives before this side has read that the peer is gone."""
    simulation.cm.hold(CmEventType.DISCONNECTED)
    async with helpers.connected(simulation.far) as pair:
        receiving = loops.create_task(pair.client.recv())
        await loops.sleep(1)
        for qp in simulation.queue_pairs():
            qp.world.network.fail_queue_pair(qp)
        pair.server.abort()
        await loops.sleep(0.001)
        assert not receiving.done()
        simulation.cm.release()
        with pytest.raises(PeerClosed):
            await receiving


@pytest.mark.parametrize(
    ("function", "left", "texts"),
    [
        ("ibv_dereg_mr", {"Region", "Domain"}, ["memory could not be unregistered", "> failed"]),
        ("ibv_destroy_cq", {"CompletionQueue", "Channel", "Domain"}, [f"sim0: {LEFT}"]),
        ("ibv_dealloc_pd", {"Domain"}, [f"sim1: {LEFT}"]),
    ],
)
async def test_an_object_that_cannot_be_destroyed_is_logged(
    simulation: Simulation,
    caplog: pytest.LogCaptureFixture,
    function: str,
    left: set[str],
    texts: list[str],
) -> None:
    async with connected(simulation) as pair:
        region = await pair.near.connection.register(bytearray(10_000))
        await pair.near.connection._endpoint.cm.reg_msgs(bytearray(10))
        simulation.world.calls.hooks[function] = Mock(side_effect=Failure(errno.EBUSY))
        region.close()
    await loops.sleep(1)
    assert simulation.left().keys() == left
    assert all(text in caplog.text for text in texts)
    simulation.exit_process()


# --- a connection that cannot be put together ---

MESSAGES, STREAMS = "aiordma.messages.message_data_path", "aiordma.streams.stream_data_path"
STEPS = [
    f"{MESSAGES}.BusyPoll",
    f"{MESSAGES}.SendQueue",
    f"{MESSAGES}.Operations",
    f"{MESSAGES}.Receiver",
    f"{STREAMS}.BusyPoll",
    f"{STREAMS}.SendQueue",
    f"{STREAMS}.ReceiveRing",
    "aiordma.qp.endpoint.FirstMessage",
]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("step", STEPS)
async def test_a_connection_that_cannot_be_put_together_leaves_nothing(
    simulation: Simulation, step: str, shares: bool
) -> None:
    is_stream = step.startswith(STREAMS)
    listen: Any = aiordma.listen_stream if is_stream else aiordma.listen
    connect: Any = aiordma.connect_stream if is_stream else aiordma.connect
    more = {"options": ConnectionOptions(shared_recv_depth=8)} if shares and not is_stream else {}
    devices = loop_device._loop_devices.setdefault(running_loop(), {})
    async with listen(simulation.far.host, PORT, **more) as listener:
        with mock.patch(step, side_effect=MemoryError("no memory for a queue")):
            requesting = loops.create_task(listener.get_request())
            connecting = loops.create_task(connect_id(simulation))
            request = await requesting
            with pytest.raises(MemoryError):
                await request.accept()
            with pytest.raises(Rejected):
                await connecting
            with pytest.raises(MemoryError):
                await connect(simulation.far.host, PORT)
    await loops.sleep(1)
    assert devices == {}


async def connect_id(simulation: Simulation) -> None:
    """Connect an id, which needs no data path."""
    async with await resolved(simulation) as cm_id:
        await ids.connect(cm_id, Script(settings()).peer.pack())


# --- a connection without a user ---


@pytest.mark.parametrize("is_dropped_first", [False, True])
async def test_a_connection_is_freed_without_the_garbage_collector(
    simulation: Simulation, is_dropped_first: bool
) -> None:
    async with aiordma.listen(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect(simulation.far.host, PORT)
        far = await accepting
        del accepting
        await near.send(b"message")
        assert await far.recv() == b"message"
        endpoints = [weakref.ref(end._endpoint) for end in (near, far)]
        gc.disable()
        try:
            if is_dropped_first:
                near.abort()
                far.abort()
            else:
                await near.aclose()
                await far.aclose()
            del near, far
            await loops.sleep(1)
            assert [endpoint() for endpoint in endpoints] == [None, None]
        finally:
            gc.enable()


async def test_what_comes_after_a_connection_is_destroyed_changes_nothing(
    simulation: Simulation,
) -> None:
    """A busy queue can be drained, and a task be closed, when the connection is freed already."""
    async with aiordma.listen(simulation.far.host, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        near = await aiordma.connect(simulation.far.host, PORT)
        endpoint = near._endpoint
        await (await accepting).aclose()
        await near.aclose()
        del near
        await loops.sleep(1)
        assert "data_path" not in vars(endpoint)
        endpoint._disconnected()
        endpoint._all_received()
        endpoint.fail(PeerClosed("late"))
        endpoint.abort()
        await endpoint.aclose()


async def test_a_ctrl_c_while_disconnecting_leaves_no_task_waiting(
    simulation: Simulation,
) -> None:
    async with connected(simulation) as pair:
        near = pair.near.connection
        waiting = loops.create_task(near.recv())
        await loops.sleep(0.01)
        interrupted = mock.patch.object(AsyncCmId, "start_disconnect", Mock(side_effect=CtrlC))
        with interrupted, pytest.raises(CtrlC):
            near._endpoint.fail(PeerClosed("the peer has left"))
        with pytest.raises(PeerClosed, match="the peer has left"):
            await near.send(b"x")
        await loops.sleep(FLUSH_SECONDS + 1)  # no receive is flushed
        with pytest.raises(PeerClosed, match="the peer has left"):
            await waiting


async def test_aborting_a_connection_that_is_destroyed_closes_it(simulation: Simulation) -> None:
    """A connection whose device is removed is destroyed in the background."""
    async with connected(simulation) as pair:
        near = pair.near.connection
        await pair.far.connection.send(b"not received")
        near._endpoint.cm.abort()
        await loops.sleep(1)
        near.abort()
        with pytest.raises(LocalClosed):
            await near.recv()


async def test_an_id_that_another_thread_closes_meanwhile_is_not_disconnected(
    simulation: Simulation,
) -> None:
    """The garbage collector runs in any thread, and there it closes a connection without a user."""
    async with connected(simulation) as pair:
        cm, disconnects = pair.near.connection._endpoint.cm, simulation.world.calls.counts
        for error in (LocalClosed("closed"), ValueError("the id is closed")):
            with mock.patch.object(AsyncCmId, "device", Mock(side_effect=error)):
                cm.start_disconnect()
        assert (cm.state, disconnects["rdma_disconnect"]) == (CmState.CONNECTED, 0)
