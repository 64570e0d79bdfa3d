"""SharedReceives: receive buffers that the connections of a listener share."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import loops
import pytest
from simulator import Simulation
from simulator.pairs import PORT, End
from simulator.verbs import CompletionQueue
from simulator.verbs import SharedReceives as Queue
from simulator.world import lib

import aiordma
from aiordma import Connection, ConnectionOptions, VerbsError
from aiordma.loop import run_in_worker, running_loop
from aiordma.qp import ReceiveRing, SharedReceives
from aiordma.qp.last_receive import LAST_RECEIVE_SECONDS, LastReceive
from aiordma.qp.receive_ring import ReceivePoster
from aiordma.verbs.device import RXE_VENDOR_ID, SIW_VENDOR_ID

SLOTS, SIZE = 8, 64
SHARED = ConnectionOptions(shared_recv_depth=SLOTS, max_message_size=SIZE, recv_backlog=20)
CLIENT = ConnectionOptions(max_message_size=SIZE)

# Seconds of the simulated network, which are more than closing needs.
SOON = 0.5


class Server:
    """A listener whose connections share receives, and connected clients."""

    def __init__(self, simulation: Simulation, listener: aiordma.Listener) -> None:
        self.simulation, self.listener = simulation, listener
        self.ends: list[End] = []
        self.clients: list[Connection] = []

    async def connect(
        self,
        options: ConnectionOptions | None = None,
        host: str = "",
        client: ConnectionOptions = CLIENT,
    ) -> tuple[Connection, End]:
        """Connect a client. `options` are those of the accepting side."""
        where = host or self.simulation.far.host, PORT
        connecting = loops.create_task(aiordma.connect(*where, options=client))
        accepted = await (await self.listener.get_request()).accept(options=options)
        self.ends.append(End(self.simulation, accepted))
        self.clients.append(await connecting)
        await self.clients[-1].send(b"first")
        assert await accepted.recv() == b"first"
        return self.clients[-1], self.ends[-1]

    @property
    def receives(self) -> SharedReceives:
        """The shared receives of the first connection."""
        receives = self.ends[0].data_path._shared_receives
        assert receives is not None
        return receives

    @property
    def posted(self) -> int:
        """The number of slots that are posted."""
        (queue,) = self.simulation.world.all(Queue)
        posted = queue.pointer.receives.posted - queue.pointer.receives.taken
        assert self.receives.ring.posted == posted
        return int(posted)


@contextlib.asynccontextmanager
async def serving(
    simulation: Simulation, options: ConnectionOptions = SHARED, host: str = ""
) -> AsyncIterator[Server]:
    """Listen, and close all connections at the end."""
    async with aiordma.listen(host or simulation.far.host, PORT, options=options) as listener:
        server = Server(simulation, listener)
        yield server
        for connection in (*server.clients, *(end.connection for end in server.ends)):
            connection.abort()
            await connection.aclose()


async def test_a_message_without_a_consumer_is_dropped(simulation: Simulation) -> None:
    """Its queue pair is destroyed. A later one can have the same number."""
    async with serving(simulation) as server:
        client, end = await server.connect()
        number, other = end.qp.number, end.data_path
        server.receives.remove(number, lambda: None)
        await client.send(b"dropped")
        await loops.sleep(0.01)
        assert (len(other.receiver), server.posted) == (0, SLOTS)
        server.receives.add(number, other, other._resources.key)
        await client.send(b"hello")
        assert await end.connection.recv() == b"hello"


@pytest.mark.transport("IB")
async def test_messages_can_be_taken_after_an_end_without_a_flush(simulation: Simulation) -> None:
    """The queue pair is destroyed. The messages are copied, and their slots are posted again."""
    async with serving(simulation) as server:
        client, end = await server.connect()
        connection = end.connection
        region = await connection.allocate(SIZE)
        simulation.network.loses_flushes = True
        end.qp.allowed = 0  # nothing completes
        task = loops.create_task(connection.read(aiordma.RemoteBuffer(1, 1, SIZE), region))
        for message in (b"held", b"one", b"two"):
            await client.send(message)
        await loops.sleep(SOON)
        held = await connection.recv_message()
        client.abort()
        with pytest.raises(aiordma.PeerClosed):
            await task
        await region.aclose()
        assert server.posted == SLOTS - 1
        assert [await connection.recv(), await connection.recv()] == [b"one", b"two"]
        assert bytes(held.data) == b"held"
        held.release()
        assert server.posted == SLOTS


async def test_each_connection_ends_alone(simulation: Simulation) -> None:
    """One of them fails: a message is longer than a slot. The slot is posted again."""
    async with serving(simulation) as server:
        client, end = await server.connect()
        other, failed = await server.connect(client=ConnectionOptions(max_message_size=SIZE + 1))
        await other.send(bytes(SIZE + 1))
        with pytest.raises(aiordma.RdmaError):
            await failed.connection.recv()
        assert server.posted == SLOTS
        await server.listener.aclose()
        await failed.connection.aclose()
        await client.send(b"last")  # the queue exists as long as it has users
        await client.aclose()  # which flushes none of its receives
        assert [message async for message in end.connection] == [b"last"]


async def fill_unpolled(server: Server) -> End:
    """Connect, and let messages arrive whose completions raise no event yet: nothing polls."""
    client, end = await server.connect()
    await loops.sleep(SOON)
    queue = end.qp.recv_cq
    queue.pointer.is_armed = 0
    for number in range(SLOTS // 2):
        await client.send(b"%d" % number)
    await loops.sleep(0.1)
    assert queue.pointer.put - queue.pointer.polled == SLOTS // 2
    return end


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("how", ["aborted", "abandoned"])
async def test_a_device_that_drops_completions_costs_no_slot(
    simulation: Simulation, how: str, reports: bool
) -> None:
    """A device that does not report the last receive delays the destruction a little."""
    simulation.far.reports_last_receive = reports
    async with serving(simulation) as server:
        for _ in range(3):
            end = await fill_unpolled(server)
            before = simulation.world.now
            if how == "aborted":
                end.connection.abort()
            else:
                end.connection._endpoint.abandon()
            await end.connection.aclose()
            limit = SOON if reports else LAST_RECEIVE_SECONDS + SOON
            assert simulation.world.now - before < limit
            assert server.posted == SLOTS
            lib.sim_raise_completion_event(end.qp.recv_cq.pointer)
        client, end = await server.connect()
        await client.send(b"served")
        assert await end.connection.recv() == b"served"


@pytest.mark.parametrize("vendor_id", [RXE_VENDOR_ID, SIW_VENDOR_ID])
async def test_soft_devices_drop_nothing_and_are_not_waited_for(
    simulation: Simulation, vendor_id: int
) -> None:
    far = simulation.far
    far.vendor_id, far.drops_completions, far.reports_last_receive = vendor_id, False, False
    async with serving(simulation) as server:
        for _ in range(3):
            end = await fill_unpolled(server)
            before = simulation.world.now
            end.connection.abort()
            await end.connection.aclose()
            assert simulation.world.now - before < SOON
            lib.sim_raise_completion_event(end.qp.recv_cq.pointer)
            await loops.sleep(SOON)
            assert server.posted == SLOTS


async def test_a_number_is_used_again_when_its_messages_are_taken(simulation: Simulation) -> None:
    """siw gives a new queue pair the number of one that is destroyed, as soon as it is."""
    far = simulation.far
    far.vendor_id, far.drops_completions, far.reports_last_receive = SIW_VENDOR_ID, False, False
    async with serving(simulation) as server:
        end = await fill_unpolled(server)
        receives, number, later = server.receives, end.qp.number, Mock()
        add = partial(receives.add, number, later, 0)
        adding = loops.create_task(run_in_worker(running_loop(), add))
        await loops.sleep(SOON)
        assert receives._consumers[number] is end.data_path
        end.connection.abort()
        await end.connection.aclose()
        await adding
        assert receives._consumers[number] is later
        assert server.posted == SLOTS
        later.received.assert_not_called()
        receives.remove(number, lambda: None)


async def test_a_removed_device_is_not_waited_for(simulation: Simulation) -> None:
    async with serving(simulation) as server:
        end = await fill_unpolled(server)
        before = simulation.world.now
        simulation.cm.remove_device(simulation.far)
        await end.connection.aclose()
        assert simulation.world.now - before < LAST_RECEIVE_SECONDS


def test_a_closed_loop_is_not_waited_for() -> None:
    """The shared receive queue belongs to the loop, and is not used any more."""
    loop: Any = Mock(is_closed=lambda: True)
    last, qp = LastReceive(loop, Mock()), Mock()
    last.wait(qp)
    qp.modify.assert_not_called()


@pytest.mark.parametrize("how", ["refused", "broken"])
async def test_a_failed_queue_ends_all_its_connections(simulation: Simulation, how: str) -> None:
    async with serving(simulation) as server:
        (one, first), (_, second) = [await server.connect() for _ in range(2)]
        waiting = loops.create_task(second.connection.recv())
        await one.send(b"hello")
        await one.send(b"again")
        await loops.sleep(0.01)
        if how == "refused":
            first.refuse_receives(errno.ENOMEM)
            assert await first.connection.recv() == b"hello"
            server.receives.repost(0)
        else:
            for queue in simulation.world.all(CompletionQueue):
                if queue.device is simulation.far:
                    queue.pointer.poll_failure = -errno.EIO
            await one.send(b"never polled")
        await loops.sleep(0.01)
        for task in (waiting, first.connection.send(b"x")):
            with pytest.raises((VerbsError, aiordma.DeviceRemoved)):
                await task
        posted = server.receives.ring.posted
        server.receives.repost(0)  # not posted, and no connection is notified
        assert server.receives.ring.posted == posted < SLOTS
        await server.connect()  # which gets a queue that works


async def test_a_listener_on_all_devices_releases_one_that_is_removed(
    simulation: Simulation,
) -> None:
    """The kernel removes a device when all that uses it is destroyed."""
    async with serving(simulation, host="0.0.0.0") as server:
        client, end = await server.connect(host=simulation.far.host)
        simulation.cm.remove_device(simulation.far)
        for connection in (client, end.connection):
            await connection.aclose()
        await loops.sleep(SOON)
        assert simulation.world.all(Queue) == []
        used = [queue.device for queue in simulation.world.all(CompletionQueue)]
        assert simulation.far not in used
        await server.connect(host=simulation.near.host)


async def test_a_listener_that_was_not_closed_releases_the_buffers(simulation: Simulation) -> None:
    async def serve_one() -> None:
        listener = await aiordma.listen(simulation.far.host, PORT, options=SHARED)
        server = Server(simulation, listener)
        client, end = await server.connect()
        for connection in (client, end.connection):
            await connection.aclose()
        assert len(simulation.world.all(Queue)) == 1
        del listener, server
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed"):
        await serve_one()
    await loops.sleep(SOON)
    assert simulation.world.all(Queue) == []


@pytest.mark.parametrize("call", ["ibv_create_comp_channel", "ibv_create_srq", "ibv_post_srq_recv"])
async def test_a_queue_that_cannot_be_made_releases_everything(
    simulation: Simulation, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(simulation) as server:
        with monkeypatch.context() as patch:
            if call != "ibv_post_srq_recv":
                after = int(call == "ibv_create_comp_channel")  # that of the client
                simulation.world.calls.fail(call, errno.ENOMEM, after=after)
            else:
                post_all = ReceiveRing.post_all

                def post_two(ring: ReceiveRing, queue: ReceivePoster, first_wr_id: int) -> None:
                    if ring.slots != SLOTS:
                        post_all(ring, queue, first_wr_id)
                        return
                    ring._open(queue, queue.cells, first_wr_id)
                    ring.post(0)
                    ring.post(1)
                    raise VerbsError(errno.ENOMEM, call)

                patch.setattr(ReceiveRing, "post_all", post_two)
            accepting: Any = loops.create_task(server.listener.accept())
            connecting = loops.create_task(aiordma.connect(simulation.far.host, PORT))
            with pytest.raises(VerbsError, match=call):
                await accepting
            with pytest.raises(aiordma.ConnectError):
                await connecting
        assert simulation.world.all(Queue) == []
        if call != "ibv_create_comp_channel":  # else the queue is never made
            await server.connect()
            assert server.posted == SLOTS


async def test_a_failure_to_destroy_the_queue_is_logged(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory stays registered: the device can still use it."""
    simulation.world.calls.fail("ibv_destroy_srq", errno.EBUSY)
    async with serving(simulation) as server:
        await server.connect()
    await loops.sleep(1)
    assert "ibv_destroy_srq" in caplog.text
    assert simulation.left().keys() == {"SharedReceives", "Region", "Domain"}
    simulation.exit_process()


async def test_each_device_has_a_queue_of_its_own(simulation: Simulation) -> None:
    async with serving(simulation, host="0.0.0.0") as server:
        assert simulation.world.all(Queue) == []
        smaller = ConnectionOptions(shared_recv_depth=1, max_message_size=SIZE - 1)
        for host in (simulation.far.host, simulation.near.host):
            for options in (None, smaller):  # smaller messages use the listener's slots
                _, end = await server.connect(options, host)
                assert end.data_path._ring.slot_size == SIZE
        queues = simulation.world.all(Queue)
        assert {queue.device.name for queue in queues} == {"sim0", "sim1"}


@pytest.mark.parametrize("listener_options", [SHARED, ConnectionOptions()])
async def test_a_connection_can_have_own_buffers(
    simulation: Simulation, listener_options: ConnectionOptions
) -> None:
    async with serving(simulation, listener_options) as server:
        client, end = await server.connect(ConnectionOptions(max_message_size=5000))
        await client.send(b"x")
        assert await end.connection.recv() == b"x"
        assert simulation.world.all(Queue) == []
        connecting = loops.create_task(aiordma.connect(simulation.far.host, PORT))
        request = await server.listener.get_request()
        larger = ConnectionOptions(shared_recv_depth=SLOTS, max_message_size=SIZE + 1)
        with pytest.raises(ValueError, match="are for listen"):
            await request.accept(options=larger if listener_options is SHARED else SHARED)
        await request.reject()
        with pytest.raises(aiordma.Rejected):
            await connecting
