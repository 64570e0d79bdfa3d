"""connect() and listen(): the addresses that are tried, requests, and how they are answered."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest import mock

import loops
import pytest
from simulator import Simulation
from simulator.world import Failure
from stream_sides import Script, settings

import aiordma
from aiordma import AddressError, BusyError, ConnectError, Connection, ConnectionOptions, Listener
from aiordma.cm import AsyncCmId, SyncCmId
from aiordma.cm.establishing import PORT_ATTEMPTS
from aiordma.cm.resolving import is_loopback, resolve_host
from aiordma.enums import CmEventType, IdOption
from aiordma.errors import DeviceRemoved, LocalClosed, Rejected, Unreachable, VerbsError
from aiordma.loop import running_loop
from aiordma.rdmacm import CmEvent, SocketAddress, parse_address

PORT = 7471
NEAR, FAR, NEAR6, FAR6 = "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"
ABSENT6 = "fd00::9"


async def connect() -> Connection:
    return await aiordma.connect(FAR, PORT)


async def receive_all(connection: Connection) -> None:
    async for _ in connection:
        pass


@asynccontextmanager
async def serving(listener: Listener) -> AsyncIterator[loops.Task[None]]:
    """Accept all peers during the block."""
    task = loops.create_task(listener.serve(receive_all))
    yield task
    listener.abort()
    await task


async def test_the_failure_of_the_last_address_is_raised(simulation: Simulation) -> None:
    simulation.names["storage"] = [ABSENT6, FAR]
    with pytest.raises(Rejected) as caught:
        await aiordma.connect("storage", PORT)
    (note,) = caught.value.__notes__
    assert note.startswith(f"tried before: no RDMA path to {ABSENT6}")
    simulation.world.calls.fail("rdma_create_id", errno.ENOMEM)
    with pytest.raises(VerbsError, match="rdma_create_id"):  # after it no other address is tried
        await aiordma.connect("storage", PORT)


async def test_a_local_address_has_the_family_of_the_peer(simulation: Simulation) -> None:
    simulation.names |= {"storage": [FAR6, FAR], "both": [NEAR6, NEAR], "v6": [FAR6]}
    async with aiordma.listen(None, PORT) as listener, serving(listener):
        for host, local, expected in (
            ("storage", ("both", 0), NEAR6),
            ("storage", (NEAR, 4711), NEAR),
            ("storage", ("", 4712), "::"),
            (FAR, ("", 4713), "0.0.0.0"),
        ):
            async with aiordma.connect(host, PORT, local_address=local) as connection:
                assert connection.local_address[1] == local[1] or not local[1]
                assert connection.local_address[0] == expected
        with pytest.raises(ConnectError, match="no address of the local address's family"):
            await aiordma.connect("v6", PORT, local_address=(NEAR, 0))


async def test_options_are_set_and_wrong_ports_refused(simulation: Simulation) -> None:
    with pytest.raises(Rejected):
        await aiordma.connect(FAR, PORT, options=ConnectionOptions(tos=32, reuse_address=True))
    assert simulation.world.calls.counts["rdma_set_option"] == 2
    functions: list[Any] = [aiordma.connect, aiordma.listen]
    for function, host, port in itertools.product(functions, (FAR, "storage"), (-1, 65536)):
        with pytest.raises(ValueError, match=f"port {port} is not between 0 and 65535"):
            await loops.create_task(function(host, port))


async def test_a_numeric_host_or_none_is_not_looked_up(simulation: Simulation) -> None:
    for host in (FAR, "::1", "fe80::1%lo"):
        assert await resolve_host(running_loop(), host, PORT) == [parse_address(host, PORT)]
    for nothing in (None, ""):
        found = await resolve_host(running_loop(), nothing, PORT)
        assert found == [parse_address(any_, PORT) for any_ in ("::", "0.0.0.0")]
    assert simulation.world.calls.counts["getaddrinfo"] == 0


async def test_a_name_gives_each_address_once(simulation: Simulation) -> None:
    vsock = (socket.AF_VSOCK, socket.SOCK_STREAM, 0, "", (2, PORT))
    found: list[Any] = [(socket.AF_INET, 1, 0, "", (FAR, PORT)), vsock]
    scoped = [("fe80::1", 1), ("fe80::1%lo", 1), ("fe80::1", 2)]
    found += [(socket.AF_INET6, 1, 0, "", (host, PORT, 0, scope)) for host, scope in scoped]
    with mock.patch.object(socket, "getaddrinfo", return_value=found):
        assert await resolve_host(running_loop(), "storage", PORT) == [
            SocketAddress(FAR, PORT),
            SocketAddress("fe80::1", PORT, socket.AF_INET6, 1),
            SocketAddress("fe80::1", PORT, socket.AF_INET6, 2),
        ]


async def test_an_unknown_name_is_an_address_error(simulation: Simulation) -> None:
    for host in ("nonesuch", "a" * 300, "..", f"fe80::1%{2**32}"):
        with pytest.raises(AddressError, match="cannot be resolved"):
            await aiordma.connect(host, PORT)


async def test_listening_on_loopback_is_refused(simulation: Simulation) -> None:
    hosts = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::", "fd07:1::1", FAR]
    assert [is_loopback(parse_address(host)) for host in hosts] == [True] * 4 + [False] * 3
    simulation.names["localhost"] = ["::1", "127.0.0.1"]
    for host in ("127.0.0.1", "::1", "localhost"):
        with pytest.raises(AddressError, match="RDMA has no loopback"):
            await aiordma.listen(host, 0)
    simulation.names["here"] = ["127.0.0.1", NEAR]
    async with aiordma.listen("here", 0) as listener:
        assert listener.local_address[0] == NEAR


async def test_one_port_is_used_in_both_families(simulation: Simulation) -> None:
    async with aiordma.listen(None, 0) as listener:
        port = listener.local_address[1]
        addresses = [one.local for one in simulation.cm.listeners]
        assert addresses == [("::", port), ("0.0.0.0", port)]
        with pytest.raises(VerbsError, match="port is in use"):
            await aiordma.listen(None, port)
        simulation.cm.ports = iter([port, port + 1])  # the first is taken: another one is tried
        async with aiordma.listen(None, 0) as other:
            assert other.local_address[1] == port + 1
    assert simulation.cm.listeners == []
    for hosts, expected in (([NEAR6], "::"), ([NEAR], "0.0.0.0"), ([], "0.0.0.0")):
        simulation.near.hosts, simulation.far.hosts = tuple(hosts), ()
        async with aiordma.listen("", PORT):  # only in a family that has addresses
            assert [one.local[0] for one in simulation.cm.listeners] == [expected]


@pytest.mark.parametrize(("port", "binds"), [(0, 2 * PORT_ATTEMPTS), (PORT, 2)])
async def test_the_search_for_a_port_ends(simulation: Simulation, port: int, binds: int) -> None:
    calls, results = simulation.world.calls, itertools.cycle([None, Failure(errno.EADDRINUSE)])
    calls.hooks["rdma_bind_addr"] = mock.Mock(side_effect=results)
    with pytest.raises(VerbsError, match="port is in use"):
        await aiordma.listen(None, port)
    assert calls.counts["rdma_bind_addr"] == binds
    calls.counts.clear()
    calls.fail("rdma_create_id", errno.ENODEV)  # is not retried
    with pytest.raises(VerbsError, match="no RDMA device"):
        await aiordma.listen(None, port)
    assert calls.counts["rdma_create_id"] == 1


@pytest.mark.parametrize(("source", "times", "calls"), [(None, 1, 2), (None, 99, 10), (5000, 1, 1)])
async def test_a_source_port_that_tcp_uses_is_replaced(
    simulation: Simulation, source: int | None, times: int, calls: int
) -> None:
    """On iWARP, where rdma_cm does not know the ports of TCP. A port of the user is not."""
    counted = simulation.world.calls
    results = [*[Failure(errno.EADDRINUSE)] * times, None, None]
    counted.hooks["rdma_connect"] = mock.Mock(side_effect=results)
    local_address = None if source is None else (NEAR, source)
    async with aiordma.listen(FAR, PORT) as listener, serving(listener):
        connecting = aiordma.connect(FAR, PORT, local_address=local_address)
        if times == calls - 1:
            async with connecting:
                pass
        else:
            with pytest.raises(VerbsError, match="Address already in use"):
                await connecting
    assert counted.counts["rdma_connect"] == calls


@pytest.mark.parametrize("after", [0, 1])
async def test_another_exception_leaves_no_id_behind(simulation: Simulation, after: int) -> None:
    results = [*[None] * after, ZeroDivisionError]
    failing = mock.patch.object(AsyncCmId, "listen", side_effect=results)
    with failing, pytest.raises(ZeroDivisionError):
        await aiordma.listen(None, PORT)


async def test_a_listener_is_opened_once_and_closed_with_its_block(simulation: Simulation) -> None:
    """The function that opens it returns an object that is awaited, or entered."""
    once = aiordma.listen(FAR, PORT)
    async with await once:
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await once
    with pytest.raises(ZeroDivisionError):
        async with aiordma.listen(FAR, PORT) as listener:
            raise ZeroDivisionError
    with pytest.raises(LocalClosed):
        await listener.get_request()
    aiordma.listen(FAR, PORT).close()
    with pytest.warns(RuntimeWarning, match="never awaited"):
        aiordma.listen(FAR, PORT)


async def test_a_listener_can_be_made_of_an_id(simulation: Simulation) -> None:
    for make in (AsyncCmId.create, SyncCmId.create):
        cm_id: Any = await make()
        with pytest.raises(aiordma.RdmaError, match="must be bound"):
            await Listener.from_id(cm_id)
        cm_id.set_option(IdOption.REUSEADDR, 1)
        cm_id.bind_addr(parse_address(FAR, PORT))
        async with Listener.from_id(cm_id) as listener, serving(listener), await connect():
            pass
    bound = await AsyncCmId.create()
    bound.bind_addr(parse_address(FAR, PORT))
    simulation.world.calls.fail("rdma_listen", errno.EADDRINUSE)
    with pytest.raises(VerbsError, match="rdma_listen"):
        await Listener.from_id(bound)


async def test_cancelling_loses_no_request(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1)
        for second in (listener.get_request, partial(listener.serve, receive_all)):
            with pytest.raises(BusyError):
                await second()
        (cm_id,) = listener._cms
        wake, cm_id.on_change = cm_id.on_change, lambda: (waiting.cancel(), None)[1]
        task = loops.create_task(connect())
        await loops.wait([waiting])
        cm_id.on_change = wake
        request = await listener.get_request()
        assert repr(request).startswith(f"<ConnectRequest from {NEAR} port ")
        await request.reject()
        with pytest.raises(Rejected):
            await task


async def test_closing_a_listener_ends_an_iteration_that_waits(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        assert repr(listener) == f"<Listener at {FAR} port {PORT}>"
        waiting = loops.create_task(anext(listener, None))
        await loops.sleep(1)
    assert await waiting is None


async def test_a_peer_that_gave_up_is_skipped(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "aiordma.cm.handshakes")
    simulation.world.calls.delay("rdma_accept", before=1)
    async with aiordma.listen(FAR, PORT) as listener:
        for how in ("accept", "serve"):
            first = loops.create_task(connect())
            await loops.sleep(1)
            await loops.cancel(first)
            await loops.sleep(1)
            if how == "accept":
                accepting: Any = loops.create_task(listener.accept())
                async with await connect(), await accepting:
                    pass
            else:
                async with serving(listener), await connect():
                    pass
    assert caplog.text.count("the handshake with <ConnectRequest") == 2
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(CmEventType.REJECTED, type(None)), (CmEventType.DEVICE_REMOVAL, DeviceRemoved)],
)
async def test_a_request_that_has_failed_cannot_be_answered(
    simulation: Simulation, kind: CmEventType, cause: type[Exception | None]
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        for answer in ("accept", "reject"):
            task = loops.create_task(connect())
            request = await listener.get_request()
            request._cm.handle_event(CmEvent(kind, 0, status=4))
            if answer == "accept":
                with pytest.raises(ConnectError, match=r"10\.0\.0\.1:") as caught:
                    await request.accept(bytes(1000))
                assert type(caught.value.__cause__) is cause
            else:
                await request.reject(b"no")
            with pytest.raises(LocalClosed, match="answered already"):
                await getattr(request, answer)()
            with pytest.raises(Rejected):
                await task


@pytest.mark.parametrize("listen", [aiordma.listen, aiordma.listen_stream])
async def test_another_event_does_not_replace_the_request(
    simulation: Simulation, listen: Any
) -> None:
    """The private data and the numbers of reads and atomics are used when it is accepted."""
    data = Script(settings()).peer.pack()
    own = ConnectionOptions(responder_resources=3, initiator_depth=2)
    async with listen(FAR, PORT) as listener:
        connecting = loops.create_task(aiordma.connect(FAR, PORT, private_data=data, options=own))
        request = await listener.get_request()
        request._cm.handle_event(CmEvent(CmEventType.ADDR_CHANGE, 0))
        assert request._cm.request.private_data.startswith(data)
        async with request.accept() as server, await connecting:
            assert server._endpoint.peer_private_data.startswith(data)
            if listen is aiordma.listen:
                assert server._endpoint.data_path.slow.remote.initiator_depth == 3


async def test_a_moved_request_keeps_its_event(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = loops.create_task(aiordma.connect(FAR, PORT, private_data=b"hello"))
        cm = (await listener.get_request())._cm
        cm.handle_event(CmEvent(CmEventType.ADDR_CHANGE, 0))
        moved = await (await cm.migrate(None)).migrate()
        assert moved.request is not None
        assert moved.request.private_data.startswith(b"hello")
        async with Connection.from_id(moved) as server, await connecting:
            assert server.private_data.startswith(b"hello")


async def test_a_request_of_a_removed_device_is_closed(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        connecting = loops.create_task(connect())
        request = await listener.get_request()
        await loops.sleep(1)
        simulation.world.calls.fail("ibv_query_device", errno.EIO)
        with pytest.raises(DeviceRemoved, match="ibv_query_device"):
            await request.accept()
        with pytest.raises(Rejected):
            await connecting


async def test_a_listener_whose_options_do_not_fit_rejects_its_peers(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    options = ConnectionOptions(send_depth=1 << 15)
    async with aiordma.listen(FAR, PORT, options=options) as listener:
        accepting = loops.create_task(listener.accept())
        with pytest.raises(Rejected):
            await connect()
        with pytest.raises(ValueError, match="sim1 allows"):
            await accepting
        async with serving(listener):
            with pytest.raises(Rejected):
                await connect()
    assert "sim1 allows" in caplog.text


async def test_serve_waits_for_its_handlers_before_it_raises(simulation: Simulation) -> None:
    async with aiordma.listen(None, PORT) as listener:
        task = loops.create_task(listener.serve(receive_all))
        async with await connect():
            await loops.sleep(1)  # the handler runs
            simulation.cm.put(listener._cms[0], CmEventType.DEVICE_REMOVAL)
            await loops.sleep(1)
            assert not task.done()
        with pytest.raises(DeviceRemoved):
            await task
        assert simulation.cm.listeners == []


async def test_only_an_unexpected_exception_of_a_handler_is_an_error(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: Connection) -> None:
        raise {b"0": ZeroDivisionError, b"1": Unreachable}[await connection.recv()]("no")

    async with aiordma.listen(FAR, PORT) as listener:
        task = loops.create_task(listener.serve(fail))
        for message in (b"0", b"1"):
            async with await connect() as connection:
                await connection.send(message)
                await receive_all(connection)
        listener.abort()
        await task
    assert [record.levelname for record in caplog.records] == ["ERROR"]
