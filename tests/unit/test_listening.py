"""connect() and listen(): the addresses that are tried, requests, and how they are answered."""

from __future__ import annotations

import asyncio
import errno
import socket
from functools import partial
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.world import Failure

import aiordma
from aiordma import (
    AddressError,
    BusyError,
    ConnectError,
    Connection,
    ConnectionOptions,
    DeviceRemoved,
    Listener,
    LocalClosed,
    Rejected,
    Unreachable,
    VerbsError,
)
from aiordma.cm import AsyncCmId, SyncCmId
from aiordma.cm.establishing import PORT_ATTEMPTS
from aiordma.cm.resolving import is_loopback, resolve_host
from aiordma.enums import CmEventType, IdOption
from aiordma.loop import running_loop
from aiordma.rdmacm import CmEvent, SocketAddress, parse_address

PORT = 7471
NEAR, FAR, NEAR6, FAR6 = "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"
ABSENT, ABSENT6 = "10.9.9.9", "fd00::9"


async def close(connection: Connection) -> None:
    await connection.aclose()


async def connect(simulation: Simulation, host: str = FAR, **more: Any) -> Connection:
    return await aiordma.connect(host, PORT, **more)


def serve(listener: Listener, handled: list[Connection] | None = None) -> loops.Task[None]:
    """Accept all peers in the background."""

    async def handler(connection: Connection) -> None:
        if handled is not None:
            handled.append(connection)
        async for _ in connection:
            pass

    return loops.create_task(listener.serve(handler))


# --- the addresses of a name ---


async def test_connect_uses_the_first_address_that_works(simulation: Simulation) -> None:
    simulation.names["storage"] = [ABSENT6, FAR, ABSENT]
    async with aiordma.listen(FAR, PORT) as listener:
        serving = serve(listener)
        async with aiordma.connect("storage", PORT) as connection:
            assert connection.peer_address == (FAR, PORT)
        listener.abort()
        await serving
    addresses = [entry for entry in simulation.world.calls.log if entry == "rdma_resolve_addr"]
    assert len(addresses) == 2


async def test_when_no_address_works_the_last_failure_is_raised(simulation: Simulation) -> None:
    simulation.names["storage"] = [ABSENT6, FAR]
    with pytest.raises(Rejected) as caught:
        await aiordma.connect("storage", PORT)
    (note,) = caught.value.__notes__
    assert note.startswith(f"tried before: no RDMA path to {ABSENT6}")


async def test_after_a_local_error_no_other_address_is_tried(simulation: Simulation) -> None:
    simulation.names["storage"] = [FAR6, FAR]
    simulation.world.calls.fail("rdma_create_id", errno.ENOMEM)
    with pytest.raises(VerbsError, match="rdma_create_id"):
        await aiordma.connect("storage", PORT)


async def test_addresses_are_tried_from_a_local_address_of_their_family(
    simulation: Simulation,
) -> None:
    simulation.names |= {"storage": [FAR6, FAR], "both": [NEAR6, NEAR], "v6": [FAR6]}
    async with aiordma.listen(None, PORT) as listener:
        served: list[Connection] = []
        serving = serve(listener, served)
        for host, local, expected in (
            ("storage", ("both", 0), NEAR6),
            ("storage", (NEAR, 4711), NEAR),
            ("storage", ("", 4712), NEAR6),
            (FAR, ("", 4713), NEAR),
        ):
            async with aiordma.connect(host, PORT, local_address=local) as connection:
                assert connection.local_address[1] == local[1] or not local[1]
                assert connection.local_address[0] in (expected, "::", "0.0.0.0")
        with pytest.raises(ConnectError, match="no address of the local address's family"):
            await aiordma.connect("v6", PORT, local_address=(NEAR, 0))
        listener.abort()
        await serving
        assert len(served) == 4


async def test_options_are_set_and_wrong_ones_refused(simulation: Simulation) -> None:
    options = ConnectionOptions(tos=32, reuse_address=True)
    with pytest.raises(Rejected):
        await aiordma.connect(FAR, PORT, options=options)
    assert simulation.world.calls.counts["rdma_set_option"] == 2
    with pytest.raises(ValueError, match="shared_recv_depth is for listen"):
        await aiordma.connect(FAR, PORT, options=ConnectionOptions(shared_recv_depth=1))
    with pytest.raises(ValueError, match="sim0 allows"):
        await aiordma.connect(FAR, PORT, options=ConnectionOptions(send_depth=1 << 15))
    for port in (-1, 65536):
        for function in (aiordma.connect, aiordma.listen):
            for host in (FAR, "storage"):
                with pytest.raises(ValueError, match=f"port {port} is not between 0 and 65535"):
                    await loops.create_task(function(host, port))


# --- names ---


async def test_a_numeric_host_or_none_is_not_looked_up(simulation: Simulation) -> None:
    async def resolve(host: str | None) -> list[SocketAddress]:
        return await resolve_host(running_loop(), host, PORT)

    for host in (FAR, "::1", "fe80::1%lo"):
        assert await resolve(host) == [parse_address(host, PORT)]
    assert (await resolve("fe80::1%lo"))[0].scope_id == socket.if_nametoindex("lo")
    for nothing in (None, ""):
        assert await resolve(nothing) == [parse_address(any_, PORT) for any_ in ("::", "0.0.0.0")]
    assert simulation.world.calls.counts["getaddrinfo"] == 0


async def test_a_name_gives_each_address_of_both_families_once(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    vsock = (socket.AF_VSOCK, socket.SOCK_STREAM, 0, "", (2, PORT))
    found: list[Any] = [(socket.AF_INET, 1, 0, "", (FAR, PORT)), vsock]
    scoped = [("fe80::1", 1), ("fe80::1%lo", 1), ("fe80::1", 2)]
    found += [(socket.AF_INET6, 1, 0, "", (host, PORT, 0, scope)) for host, scope in scoped]
    with monkeypatch.context() as patch:  # ends before the simulation restores the function
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert await resolve_host(running_loop(), "storage", PORT) == [
            SocketAddress(FAR, PORT),
            SocketAddress("fe80::1", PORT, socket.AF_INET6, 1),
            SocketAddress("fe80::1", PORT, socket.AF_INET6, 2),
        ]


@pytest.mark.parametrize("host", ["nonesuch", "a" * 300, "..", f"fe80::1%{2**32}"])
async def test_an_unknown_name_is_an_address_error(simulation: Simulation, host: str) -> None:
    with pytest.raises(AddressError, match="cannot be resolved"):
        await aiordma.connect(host, PORT)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::", False),
        ("fd07:1::1", False),
        (FAR, False),
    ],
)
def test_every_form_of_a_loopback_address_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(parse_address(host)) is expected


# --- listening ---


async def test_listening_on_loopback_is_refused(simulation: Simulation) -> None:
    simulation.names["localhost"] = ["::1", "127.0.0.1"]
    for host in ("127.0.0.1", "::1", "localhost"):
        with pytest.raises(AddressError, match="RDMA has no loopback"):
            await aiordma.listen(host, 0)
    simulation.names["here"] = ["127.0.0.1", NEAR]
    async with aiordma.listen("here", 0) as listener:
        assert listener.local_address[0] == NEAR


async def test_listening_on_all_addresses_uses_one_port_in_both_families(
    simulation: Simulation,
) -> None:
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


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([NEAR6], ["::"]), ([NEAR], ["0.0.0.0"]), ([], ["0.0.0.0"])],
)
async def test_a_family_without_addresses_is_skipped(
    simulation: Simulation, hosts: list[str], expected: list[str]
) -> None:
    simulation.near.hosts, simulation.far.hosts = tuple(hosts), ()
    async with aiordma.listen("", PORT):
        assert [one.local[0] for one in simulation.cm.listeners] == expected


@pytest.mark.parametrize(
    ("port", "code", "binds"),
    [(0, errno.EADDRINUSE, 2 * PORT_ATTEMPTS), (PORT, errno.EADDRINUSE, 2)],
)
async def test_the_search_for_a_port_ends(
    simulation: Simulation, port: int, code: int, binds: int
) -> None:
    def fail_every_second_call() -> None:
        if not simulation.world.calls.counts["rdma_bind_addr"] % 2:
            raise Failure(code)

    simulation.world.calls.hooks["rdma_bind_addr"] = fail_every_second_call
    with pytest.raises(VerbsError, match="port is in use"):
        await aiordma.listen(None, port)
    assert simulation.world.calls.counts["rdma_bind_addr"] == binds


async def test_a_failure_of_the_first_address_is_not_retried(simulation: Simulation) -> None:
    simulation.world.calls.fail("rdma_create_id", errno.ENODEV)
    with pytest.raises(VerbsError, match="no RDMA device"):
        await aiordma.listen(None, 0)
    assert simulation.world.calls.counts["rdma_create_id"] == 1


@pytest.mark.parametrize("after", [0, 1])
async def test_another_exception_leaves_no_id_behind(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    listen, calls = AsyncCmId.listen, iter(range(9))

    def interrupted(cm_id: AsyncCmId, backlog: int) -> None:
        if next(calls) == after:
            raise KeyError
        listen(cm_id, backlog)

    monkeypatch.setattr(AsyncCmId, "listen", interrupted)
    with pytest.raises(KeyError):
        await aiordma.listen(None, PORT)


async def test_listening_without_a_channel_raises(simulation: Simulation) -> None:
    async with await AsyncCmId.create() as cm_id:
        cm_id.bind_addr(parse_address(NEAR, PORT))
        simulation.world.calls.fail("rdma_create_event_channel", errno.EMFILE)
        with pytest.raises(VerbsError) as caught:
            cm_id.listen()
        assert caught.value.errno == errno.EMFILE
        cm_id.listen()


async def test_a_listener_can_be_made_of_an_id(simulation: Simulation) -> None:
    for make in (AsyncCmId.create, SyncCmId.create):
        cm_id: Any = await make()
        with pytest.raises(aiordma.RdmaError, match="must be bound"):
            await Listener.from_id(cm_id)
        cm_id.set_option(IdOption.REUSEADDR, 1)
        cm_id.bind_addr(parse_address(FAR, PORT))
        async with Listener.from_id(cm_id) as listener:
            serving = serve(listener)
            async with await connect(simulation):
                pass
            listener.abort()
            await serving
    bound = await AsyncCmId.create()
    bound.bind_addr(parse_address(FAR, PORT))
    simulation.world.calls.fail("rdma_listen", errno.EADDRINUSE)
    with pytest.raises(VerbsError, match="rdma_listen"):
        await Listener.from_id(bound)


# --- requests ---


async def test_requests_of_both_families_are_returned_and_rejected(simulation: Simulation) -> None:
    async with aiordma.listen(None, PORT) as listener:
        for host, own in ((FAR, NEAR), (FAR6, NEAR6)):
            task = loops.create_task(connect(simulation, host, private_data=b"hello"))
            request = await listener.get_request()
            assert request.private_data.rstrip(b"\0") == b"hello"
            assert (request.peer_address[0], request.local_address) == (own, (host, PORT))
            assert repr(request).startswith(f"<ConnectRequest from {own} port ")
            for answer in (request.accept, request.reject):
                with pytest.raises(ValueError, match="at most"):
                    await answer(bytes(252))
            await request.reject(b"no")
            with pytest.raises(Rejected) as caught:
                await task
            assert caught.value.private_data.rstrip(b"\0") == b"no"
            for answer in (request.accept, request.reject):
                with pytest.raises(LocalClosed, match="answered already"):
                    await answer()


async def test_cancelling_loses_no_request(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.sleep(1)
        for second in (listener.get_request, partial(listener.serve, close)):
            with pytest.raises(BusyError):
                await second()
        (cm_id,) = listener._cms
        wake, cm_id.on_change = cm_id.on_change, lambda: (waiting.cancel(), None)[1]
        task = loops.create_task(connect(simulation))
        await loops.wait([waiting])
        cm_id.on_change = wake
        await (await listener.get_request()).reject()
        with pytest.raises(Rejected):
            await task


async def test_closing_ends_every_wait_and_rejects_the_peers(simulation: Simulation) -> None:
    listener = await aiordma.listen(FAR, PORT)
    assert repr(listener) == f"<Listener at {FAR} port {PORT}>"

    async def iterate() -> list[Any]:
        return [request async for request in listener]

    waiting = loops.create_task(iterate())
    await loops.sleep(1)
    await listener.aclose()
    assert await waiting == []
    with pytest.raises(LocalClosed):
        await listener.get_request()
    with pytest.raises(Rejected):
        await connect(simulation)
    listener = await aiordma.listen(FAR, PORT)
    task = loops.create_task(connect(simulation))
    await loops.sleep(1)
    assert not task.done()
    await listener.aclose()
    with pytest.raises(Rejected):
        await task


@pytest.mark.parametrize("how", ["accept", "serve"])
async def test_a_peer_that_gave_up_is_skipped(
    simulation: Simulation, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma")
    async with aiordma.listen(FAR, PORT) as listener:
        first = loops.create_task(connect(simulation))
        await loops.sleep(1)
        first.cancel()
        await loops.wait([first])
        await loops.sleep(1)
        simulation.world.calls.delay("rdma_accept", before=1)
        accepting = loops.create_task(listener.accept()) if how == "accept" else serve(listener)
        async with await connect(simulation) as connection:
            assert connection.peer_address == (FAR, PORT)
        if how == "accept":
            accepted: Any = await accepting
            await accepted.aclose()
        else:
            listener.abort()
            await accepting
    assert " ended: " in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize("kind", [CmEventType.REJECTED, CmEventType.DEVICE_REMOVAL])
async def test_a_request_that_has_failed_cannot_be_answered(
    simulation: Simulation, kind: CmEventType
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        for answer in ("accept", "reject"):
            task = loops.create_task(connect(simulation))
            request = await listener.get_request()
            request._cm.handle_event(CmEvent(kind, 0, status=4))
            if answer == "accept":
                with pytest.raises(ConnectError):
                    await request.accept(bytes(1000))
            else:
                await request.reject(b"no")
            with pytest.raises(LocalClosed, match="answered already"):
                await getattr(request, answer)()
            with pytest.raises(Rejected):
                await task


# --- serving ---


async def test_cancelling_serve_stops_listening(simulation: Simulation) -> None:
    listener = await aiordma.listen(FAR, PORT)
    serving = serve(listener)
    async with await connect(simulation):
        serving.cancel()
        with pytest.raises(loops.CancelledError):
            await serving
    await listener.aclose()
    assert simulation.cm.listeners == []


async def test_serve_waits_for_its_handlers_before_it_raises(simulation: Simulation) -> None:
    async with aiordma.listen(None, PORT) as listener:
        serving = serve(listener)
        async with await connect(simulation):
            simulation.cm.put(listener._cms[0], CmEventType.DEVICE_REMOVAL)
            await loops.sleep(1)
            assert not serving.done()
        with pytest.raises(DeviceRemoved):
            await serving
        assert simulation.cm.listeners == []


async def test_a_handler_that_raises_ends_only_its_connection(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: Connection) -> None:
        raise {b"0": ZeroDivisionError, b"1": Unreachable}[await connection.recv()]("no")

    async with aiordma.listen(FAR, PORT) as listener:
        serving = loops.create_task(listener.serve(fail))
        for message in (b"0", b"1"):
            async with await connect(simulation) as connection:
                await connection.send(message)
                assert [one async for one in connection] == []
        listener.abort()
        await serving
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_listener_shares_its_receives(simulation: Simulation) -> None:
    options = ConnectionOptions(shared_recv_depth=8, max_message_size=64)
    async with aiordma.listen(FAR, PORT, options=options) as listener:
        tasks = [loops.create_task(connect(simulation)) for _ in range(3)]
        request = await listener.get_request()
        with pytest.raises(ValueError, match="are for listen"):
            await request.accept(options=ConnectionOptions(shared_recv_depth=8))
        served = [await request.accept(), await listener.accept()]
        served.append(await (await listener.get_request()).accept(options=ConnectionOptions()))
        assert simulation.left()["SharedReceives"] == 1
        for task in tasks:
            await (await task).aclose()
        for connection in served:
            await connection.aclose()


@pytest.mark.loops("asyncio")
async def test_a_timeout_of_the_block_aborts_the_connection(simulation: Simulation) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        serving = serve(listener)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), aiordma.connect(FAR, PORT) as connection:
                await connection.recv()
        assert connection.closed
        listener.abort()
        await serving
