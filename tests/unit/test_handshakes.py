"""Peers that are accepted at the same time, and the limits of a listener on its peers."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import loops
import pytest
from simulator import Simulation
from simulator.cm import Channel, Event
from stream_sides import Script, settings

import aiordma
import aiordma.anyio
from aiordma import (
    ConnectError,
    Connection,
    ConnectionOptions,
    ConnectRequest,
    Listener,
    ListenerLimits,
    ReceiveOverrun,
    Rejected,
)
from aiordma.cm.handshakes import CONFIRM_SECONDS
from aiordma.cm.occasional_log import LOG_SECONDS, OccasionalLog
from aiordma.errors import PeerClosed

PORT = 7471
NEAR, FAR, NEAR6 = "10.0.0.1", "10.0.0.2", "fd00::1"
OTHER = "10.0.0.3"
"""A second address of the near device."""

# On iWARP the accepting side has the connection once it has answered.
pytestmark = pytest.mark.transport("IB")


async def connect(host: str = FAR, local: str = NEAR) -> Connection:
    return await aiordma.connect(host, PORT, local_address=(local, 0))


@asynccontextmanager
async def silent_peer(
    simulation: Simulation, private_data: bytes = b"", local: str = NEAR
) -> AsyncIterator[Connection]:
    """Connect a peer whose confirmation is lost. It has its connection, the listener has none."""
    simulation.cm.lose_ready = True
    connection = await aiordma.connect(
        FAR, PORT, private_data=private_data, local_address=(local, 0)
    )
    await loops.sleep(0.1)  # longer than a message is under way
    simulation.cm.lose_ready = False
    yield connection
    connection.abort()
    await connection.aclose()


async def receive_all(connection: Connection) -> None:
    async for _ in connection:
        pass


@asynccontextmanager
async def serving(listener: Listener) -> AsyncIterator[None]:
    """Accept all peers during the block."""
    task = loops.create_task(listener.serve(receive_all))
    yield
    listener.abort()
    await task


# --- one peer does not delay the others ---


async def test_accept_returns_the_peer_that_confirms_first(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept(b"welcome"))
        async with silent_peer(simulation):
            began = loops.now()
            async with await connect() as second, await accepting as server:
                assert loops.now() - began < CONFIRM_SECONDS
                assert server.peer_address == second.local_address
                assert second.private_data.startswith(b"welcome")
            assert listener.stats.handshakes == 1


async def test_streams_are_accepted_beside_a_silent_peer(simulation: Simulation) -> None:
    async with aiordma.listen_stream(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with silent_peer(simulation, Script(settings()).peer.pack()):
            began = loops.now()
            async with aiordma.connect_stream(FAR, PORT) as second, await accepting as server:
                assert server.peer_address == second.local_address
                assert loops.now() - began < CONFIRM_SECONDS


async def test_anyio_accepts_and_serves_beside_a_silent_peer(simulation: Simulation) -> None:
    async with aiordma.anyio.listen(FAR, PORT) as listener, anyio.create_task_group() as tasks:
        accepting = loops.create_task(listener.accept())
        async with silent_peer(simulation):
            began = loops.now()
            async with await connect(), await accepting:
                pass

            async def echo(stream: aiordma.anyio.RdmaConnection) -> None:
                await stream.send(await stream.receive())

            tasks.start_soon(listener.serve, echo)
            async with await connect() as second:
                await second.send(b"ping")
                assert await second.recv() == b"ping"
            assert loops.now() - began < CONFIRM_SECONDS
            tasks.cancel_scope.cancel()


async def test_connections_established_meanwhile_are_for_the_next_calls(
    simulation: Simulation,
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = [loops.create_task(connect()) for _ in range(3)]
        accepted = [await listener.accept() for _ in connecting]
        clients = await loops.gather(*connecting)
        assert {one.peer_address for one in accepted} == {one.local_address for one in clients}
        assert listener.stats.accepted == 3
        for one in (*accepted, *clients):
            one.abort()


async def test_a_cancelled_accept_loses_no_connection(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = await loops.start(listener.accept())
        simulation.world.calls.delay("rdma_accept", before=1)
        connecting = loops.create_task(connect())
        await loops.until(lambda: listener.stats.handshakes, "the handshake to begin")
        await loops.cancel(accepting)
        async with await connecting as client, await listener.accept() as server:
            assert server.peer_address == client.local_address


async def test_serve_serves_the_connections_that_an_accept_has_left(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = [loops.create_task(connect()) for _ in range(2)]
        accepted = await listener.accept()
        clients = await loops.gather(*connecting)
        await loops.until(lambda: listener.stats.accepted == 2, "both to be established")
        served = list[tuple[str, int]]()

        async def note(connection: Connection) -> None:
            served.append(connection.peer_address)

        serving = loops.create_task(listener.serve(note))
        await loops.until(lambda: served, "the second one to be served")
        assert served[0] in {client.local_address for client in clients}
        listener.abort()
        await serving
        for connection in (accepted, *clients):
            connection.abort()


async def test_a_cancelled_serve_ends_the_handshakes_under_way(simulation: Simulation) -> None:
    """One has begun, one has just arrived, and their peers see the end."""
    async with aiordma.listen(FAR, PORT) as listener:
        serving = loops.create_task(listener.serve(receive_all))
        async with silent_peer(simulation) as silent:
            simulation.world.calls.delay("rdma_accept", before=1)
            connecting = loops.create_task(connect())
            await loops.until(lambda: listener.stats.handshakes == 2, "the handshake to begin")
            await loops.cancel(serving)
            assert listener.stats.handshakes == 0
            with pytest.raises(PeerClosed):
                await silent.recv()
            with pytest.raises(PeerClosed):
                async with await connecting as client:
                    await client.recv()
            await loops.until(lambda: not listener.stats.connections, "all to be destroyed")


async def test_serve_does_not_wait_for_the_peers_that_it_has_not_accepted(
    simulation: Simulation,
) -> None:
    """Destroying the id of a silent peer can take minutes."""
    async with aiordma.listen(FAR, PORT) as listener:
        task = loops.create_task(listener.serve(receive_all))
        async with silent_peer(simulation):
            simulation.world.calls.delay("aiordma_destroy_id", before=60)
            began = loops.now()
            listener.abort()
            await task
            assert loops.now() - began < 1
            assert listener.stats.connections == 1


async def test_an_error_while_a_handshake_ends_does_not_end_the_others(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abort = ConnectRequest.abort

    def abort_and_raise(request: ConnectRequest) -> None:
        abort(request)
        raise ZeroDivisionError

    monkeypatch.setattr(ConnectRequest, "abort", abort_and_raise)
    async with (
        aiordma.listen(FAR, PORT) as listener,
        serving(listener),
        await connect() as other,
    ):
        simulation.world.calls.fail("rdma_create_qp", errno.ENOMEM, after=1)
        with pytest.raises(Rejected):
            await connect()
        await loops.until(lambda: "could not be ended" in caplog.text, "the error to be logged")
        assert listener.stats.handshakes == 0
        await other.send(b"still served")


async def test_closing_ends_handshakes_and_connections_that_were_not_taken(
    simulation: Simulation,
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = await loops.start(listener.accept())
        async with silent_peer(simulation) as silent:
            simulation.world.calls.delay("rdma_accept", before=1)
            connecting = loops.create_task(connect())
            await loops.until(lambda: listener.stats.handshakes == 2, "the handshake to begin")
            await loops.cancel(accepting)
            client = await connecting
            await loops.until(lambda: listener.stats.accepted, "the second peer to be accepted")
            listener.abort()
            for connection in (silent, client):
                with pytest.raises(PeerClosed):
                    await connection.recv()
            await client.aclose()


# --- the time for a handshake ---


@pytest.mark.parametrize("listen", [aiordma.listen, aiordma.listen_stream])
async def test_a_peer_that_does_not_confirm_in_time_is_given_up(
    simulation: Simulation, listen: Callable[..., Any]
) -> None:
    limits = ListenerLimits(handshake_timeout=2.5)
    async with listen(FAR, PORT, limits=limits) as listener:
        requesting = loops.create_task(listener.get_request())
        simulation.cm.lose_ready = True
        data = Script(settings()).peer.pack()
        connecting = loops.create_task(aiordma.connect(FAR, PORT, private_data=data))
        request = await requesting
        began = loops.now()
        with pytest.raises(ConnectError, match=r"10\.0\.0\.1:\d+ did not confirm within 2\.5 s"):
            await request.accept()
        assert 2.5 <= loops.now() - began < 3
        async with await connecting as client:
            with pytest.raises(PeerClosed):
                await client.recv()
        assert listener.stats.connections == 0


async def test_serve_counts_the_peers_that_do_not_confirm(simulation: Simulation) -> None:
    limits = ListenerLimits(handshake_timeout=2)
    async with aiordma.listen(FAR, PORT, limits=limits) as listener, serving(listener):
        async with silent_peer(simulation):
            await loops.until(lambda: listener.stats.failed, "the handshake to fail")
        assert listener.stats.handshakes == listener.stats.connections == 0


async def test_abort_has_no_effect_on_an_accepted_connection(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = loops.create_task(connect())
        request = await listener.get_request()
        async with request.accept() as server, await connecting as client:
            request.abort()
            await server.send(b"still there")
            assert await client.recv() == b"still there"
        connecting = loops.create_task(connect())
        (await listener.get_request()).abort()
        with pytest.raises(Rejected):
            await connecting


# --- the number of handshakes ---


async def test_a_new_peer_waits_for_a_young_handshake_and_ends_an_old_one(
    simulation: Simulation,
) -> None:
    limits = ListenerLimits(max_handshakes=2)
    async with (
        aiordma.listen(FAR, PORT, limits=limits) as listener,
        serving(listener),
        silent_peer(simulation) as first,
        silent_peer(simulation) as second,
    ):
        began = loops.now()
        async with await connect():
            assert CONFIRM_SECONDS / 2 < loops.now() - began < CONFIRM_SECONDS + 0.1
            with pytest.raises(PeerClosed):
                await first.recv()  # the oldest
            await loops.until(lambda: listener.stats.accepted, "the third to be accepted")
            stats = listener.stats
            assert (stats.dropped, stats.handshakes, stats.connections) == (1, 1, 2)
        assert not second.closed


async def test_the_time_to_confirm_begins_with_the_reply(simulation: Simulation) -> None:
    """Making a queue pair can take long here, which is not the fault of the peer."""
    limits = ListenerLimits(max_handshakes=1)
    async with aiordma.listen(FAR, PORT, limits=limits) as listener, serving(listener):
        simulation.world.calls.delay("rdma_accept", before=2 * CONFIRM_SECONDS)
        connecting = [loops.create_task(connect()) for _ in range(3)]
        for task in connecting:
            async with await task:
                pass
        assert (listener.stats.accepted, listener.stats.dropped) == (3, 0)


@pytest.mark.usefixtures("two_hosts")
async def test_the_host_with_the_most_handshakes_loses_its_oldest(simulation: Simulation) -> None:
    limits = ListenerLimits(max_handshakes=3)
    async with (
        aiordma.listen(FAR, PORT, limits=limits) as listener,
        serving(listener),
        silent_peer(simulation, local=OTHER) as oldest,
        silent_peer(simulation) as second,
        silent_peer(simulation) as third,
    ):
        async with await connect():
            with pytest.raises(PeerClosed):
                await second.recv()
        assert not oldest.closed
        assert not third.closed


# --- the number of connections ---


async def test_requests_over_the_limit_are_rejected_at_once_and_logged_once(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ListenerLimits(max_connections=2)
    async with (
        aiordma.listen(None, PORT, limits=limits) as listener,
        serving(listener),
        await connect() as first,
        await connect(),
    ):
        began = loops.now()
        for _ in range(5):
            with pytest.raises(Rejected):
                await connect()
        assert loops.now() - began < 1
        assert listener.stats.rejected == 5
        await first.aclose()
        await loops.until(lambda: listener.stats.connections == 1, "the connection to end")
        async with await connect():
            pass
    (record,) = caplog.records
    assert record.getMessage().startswith(f"a connection request of {NEAR} was rejected")


async def test_waiting_requests_count_as_connections(simulation: Simulation) -> None:
    limits = ListenerLimits(max_connections=1)
    async with aiordma.listen(None, PORT, limits=limits) as listener:
        waiting = loops.create_task(connect())
        await loops.until(lambda: listener.stats.requests_waiting, "the request to arrive")
        for host, local in ((FAR, NEAR), ("fd00::2", NEAR6)):  # of either listening id
            with pytest.raises(Rejected):
                await connect(host, local)
        request = await listener.get_request()
        with pytest.raises(Rejected):
            await connect()
        await request.reject()
        with pytest.raises(Rejected):
            await waiting
        assert listener.stats.connections == 0


# --- who is next ---


@pytest.fixture
def two_hosts(simulation: Simulation) -> None:
    """Give the near device a second address."""
    simulation.near.hosts = (*simulation.near.hosts, OTHER)


def hosts_of(requests: list[ConnectRequest]) -> list[str]:
    return [request.peer_address[0] for request in requests]


def has_waiting(listener: Listener, count: int) -> bool:
    return listener.stats.requests_waiting == count


async def take(listener: Listener, count: int) -> list[ConnectRequest]:
    return [await listener.get_request() for _ in range(count)]


async def reject(requests: list[ConnectRequest], connecting: list[loops.Task[Connection]]) -> None:
    for request in requests:
        await request.reject()
    for outcome in await loops.gather(*connecting, return_exceptions=True):
        assert isinstance(outcome, Rejected)


@pytest.mark.usefixtures("two_hosts")
async def test_the_hosts_of_the_peers_take_turns(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = []
        for local in (NEAR, NEAR, NEAR, OTHER, OTHER):
            connecting.append(loops.create_task(connect(local=local)))
            await loops.until(partial(has_waiting, listener, len(connecting)), "a request")
        requests = await take(listener, 5)
        assert hosts_of(requests) == [NEAR, OTHER, NEAR, OTHER, NEAR]
        await reject(requests, connecting)


@pytest.mark.usefixtures("two_hosts")
async def test_a_full_backlog_drops_the_newest_request_of_the_host_with_the_most(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiordma.listen(FAR, PORT, backlog=3) as listener:
        flood = [loops.create_task(connect()) for _ in range(10)]
        await loops.until(lambda: listener.stats.rejected == 7, "seven to be rejected")
        good = loops.create_task(connect(local=OTHER))
        await loops.until(lambda: listener.stats.rejected == 8, "one to be rejected")
        assert listener.stats.requests_waiting == 3
        requests = await take(listener, 3)
        assert hosts_of(requests) == [NEAR, OTHER, NEAR]
        await reject(requests, [*flood, good])
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("two_hosts")
async def test_max_connections_rejects_the_newest_request_of_the_host_with_the_most(
    simulation: Simulation,
) -> None:
    limits = ListenerLimits(max_connections=3)
    async with aiordma.listen(FAR, PORT, limits=limits) as listener:
        flood = [loops.create_task(connect()) for _ in range(10)]
        await loops.until(lambda: listener.stats.rejected == 7, "seven to be rejected")
        good = loops.create_task(connect(local=OTHER))
        await loops.until(lambda: listener.stats.rejected == 8, "one to be rejected")
        requests = await take(listener, 3)
        assert hosts_of(requests) == [NEAR, OTHER, NEAR]
        with pytest.raises(Rejected):  # all three are in use
            await connect(local=OTHER)
        await reject(requests, [*flood, good])


@pytest.mark.usefixtures("two_hosts")
async def test_requests_are_read_before_the_next_handshake_begins(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of another host does not wait behind all requests that came before it."""
    begun: list[str] = []
    held: list[tuple[Channel, Event]] = []
    put = Channel.put

    def put_unless_held(channel: Channel, event: Event) -> None:
        if event.listener is not None and event.cm_id.remote[0] == OTHER:
            held.append((channel, event))
        else:
            put(channel, event)

    monkeypatch.setattr(Channel, "put", put_unless_held)

    async def accept(request: ConnectRequest) -> Connection:
        begun.append(request.peer_address[0])
        while held:
            put(*held.pop())
        return await request.accept()

    async with aiordma.listen(FAR, PORT) as listener:
        connecting = [loops.create_task(connect()) for _ in range(10)]
        connecting.append(loops.create_task(connect(local=OTHER)))
        await loops.until(lambda: has_waiting(listener, 10) and len(held) == 1, "the requests")
        ends = [await listener._accept_next(accept) for _ in connecting]
        ends += await loops.gather(*connecting)
        assert begun.index(OTHER) < 5
        for end in ends:
            end.abort()
            await end.aclose()


async def test_both_families_of_a_listener_take_turns(simulation: Simulation) -> None:
    async with aiordma.listen(None, PORT) as listener:
        connecting = [loops.create_task(connect()) for _ in range(3)]
        connecting += [loops.create_task(connect("fd00::2", NEAR6)) for _ in range(3)]
        await loops.until(lambda: listener.stats.requests_waiting == 6, "all requests to arrive")
        requests = await take(listener, 6)
        families = [":" in host for host in hosts_of(requests)]
        assert all(one != other for one, other in itertools.pairwise(families))
        await reject(requests, connecting)


# --- the log ---


@pytest.mark.parametrize("error", [ReceiveOverrun("too many"), ConnectError("gone")])
async def test_what_a_peer_causes_is_no_error_in_the_log(
    simulation: Simulation, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma.cm.accepting")

    async def fail(connection: Connection) -> None:
        raise error

    async with aiordma.listen(FAR, PORT) as listener:
        task = loops.create_task(listener.serve(fail))
        async with await connect() as client:
            await receive_all(client)
        listener.abort()
        await task
    (record,) = [one for one in caplog.records if str(error) in one.getMessage()]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)


async def test_serve_logs_once_in_a_while_that_no_peer_can_be_accepted(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    options = ConnectionOptions(send_depth=1 << 15)  # more than the device allows
    async with aiordma.listen(FAR, PORT, options=options) as listener:
        for _ in range(2):  # accept() raises it
            accepting = loops.create_task(listener.accept())
            with pytest.raises(Rejected):
                await connect()
            with pytest.raises(ValueError, match="sim1 allows"):
                await accepting
        async with serving(listener):
            for _ in range(3):
                with pytest.raises(Rejected):
                    await connect()
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "could not be accepted: sim1 allows a send_depth" in record.getMessage()


async def test_handshakes_that_fail_or_are_dropped_are_logged_once_in_a_while(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiordma.cm.handshakes")
    limits = ListenerLimits(max_handshakes=1, handshake_timeout=2 * CONFIRM_SECONDS)
    async with aiordma.listen(FAR, PORT, limits=limits) as listener, serving(listener):
        async with silent_peer(simulation), silent_peer(simulation), silent_peer(simulation):
            await loops.until(lambda: listener.stats.failed, "the last handshake to fail")
        assert listener.stats.dropped == 2
    assert [(one.levelname, one.getMessage().split()[-1]) for one in caplog.records] == [
        ("INFO", "request"),
        ("DEBUG", "request"),
        ("DEBUG", "s"),
    ]


def test_messages_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = OccasionalLog(logging.getLogger("aiordma"), lambda: now)
    for later in (0, 1, LOG_SECONDS - 2, 1, 0, 2 * LOG_SECONDS):
        now += later
        log.log(logging.WARNING, "from %s", NEAR)
    assert [record.getMessage() for record in caplog.records] == [
        f"from {NEAR}",
        f"from {NEAR} (2 such messages were left out)",
        f"from {NEAR} (1 such messages were left out)",
    ]


def test_limits_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"max_handshakes": 0},
        {"max_connections": 0},
        {"handshake_timeout": 0.0},
    ]
    for one in wrong:
        with pytest.raises(ValueError, match=next(iter(one))):
            ListenerLimits(**one)
