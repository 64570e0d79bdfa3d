"""Migration: ids move from a loop to threads and back, and to other loops. Nothing is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TypeVar

import loops
import pytest
from cm_ids import SMALL, CmId, close, connect, listening, resolved
from helpers import has_pending_event, has_waiter

import aiordma
from aiordma import AsyncCmId, BusyError, Connection, LocalClosed, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import AddrInfoFlags
from aiordma.rdmacm import AddrInfo, DeviceAddress, parse_address

T = TypeVar("T")


async def test_ids_migrate_both_ways_at_every_step(any_address: DeviceAddress) -> None:
    async with await listening(any_address, AsyncCmId) as listener:
        client = await SyncCmId.create()
        await client.resolve_addr(parse_address(*listener.local_address))
        migrated = await client.migrate()
        assert migrated.state is CmState.ADDR_RESOLVED
        await migrated.resolve_route()
        client = await migrated.migrate(None)
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        request = await (await listener.get_request()).migrate(None)
        await request.create_qp(SMALL)
        await request.accept()
        await connecting
        migrated = await client.migrate()
        server = await request.migrate()
        assert migrated.state is server.state is CmState.CONNECTED
        await loops.gather(migrated.disconnect(), server.disconnect())
        await close(migrated, server)


async def test_the_old_id_is_closed_by_a_migration(address: DeviceAddress) -> None:
    first = await SyncCmId.create()
    second = await first.migrate()
    with pytest.raises(LocalClosed):
        await first.resolve_addr(parse_address(address.host, 1))
    await first.aclose()
    with pytest.raises(LocalClosed):
        await first.migrate()
    third = await second.migrate(None)
    with pytest.raises(LocalClosed):
        await second.get_request()
    await second.aclose()
    third.bind_addr(parse_address(address.host))
    await third.aclose()


async def test_migrate_while_a_task_waits_raises_busy(address: DeviceAddress) -> None:
    for listener in (await listening(address, SyncCmId), await listening(address, AsyncCmId)):
        waiting = loops.create_task(listener.get_request())
        await loops.until(partial(has_waiter, listener), "a task to wait for a request")
        with pytest.raises(BusyError):
            await listener.migrate(*(() if isinstance(listener, SyncCmId) else (None,)))
        assert listener.state is CmState.LISTENING
        await listener.aclose()
        with pytest.raises(LocalClosed):
            await waiting


async def test_pending_requests_migrate_with_their_listener(address: DeviceAddress) -> None:
    """The requests arrive before, between and after two migrations."""
    listener = await listening(address, AsyncCmId)
    clients = [await resolved(listener.local_address, AsyncCmId) for _ in range(6)]
    connecting = [loops.create_task(client.connect()) for client in clients[:2]]
    await loops.until(partial(has_pending_event, listener), "a request to arrive")
    waiting = await listener.migrate(None)
    connecting += [loops.create_task(client.connect()) for client in clients[2:4]]
    # No loop reads their events. They wait in the kernel.
    await loops.until(lambda: has_pending_event(waiting), "another request to arrive")
    listener = await waiting.migrate()
    connecting += [loops.create_task(client.connect()) for client in clients[4:]]
    for _ in clients:
        server = await listener.get_request()
        server.reject(b"later")
        await server.aclose()
    answers = await loops.gather(*connecting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [aiordma.Rejected] * 6
    await close(*clients, listener)


async def test_a_pending_disconnect_migrates_with_its_id(address: DeviceAddress) -> None:
    async with await listening(address, AsyncCmId) as listener:
        client = await resolved(listener.local_address, AsyncCmId)
        server = await connect(client, listener)
        waiting = await client.migrate(None)
        await server.aclose()
        await loops.until(lambda: has_pending_event(waiting), "the disconnect to arrive")
        client = migrated = await waiting.migrate()
        await loops.until(
            lambda: migrated.state is not CmState.CONNECTED, "the pending event to be handled"
        )
        assert client.state is CmState.DISCONNECTED
        await client.aclose()


async def test_a_listener_migrates_to_the_loop_of_another_thread(address: DeviceAddress) -> None:
    """A listener rejects requests in one loop, then in another one. No request is lost."""
    returned: list[SyncCmId] = []
    answered = 0

    async def serve(waiting: SyncCmId) -> None:
        nonlocal answered
        listener = await waiting.migrate()
        for _ in range(3):
            server = await listener.get_request()
            server.reject(b"elsewhere")
            await server.aclose()
            answered += 1
        returned.append(await listener.migrate(None))

    listener = await listening(address, AsyncCmId)
    clients = [await resolved(listener.local_address, AsyncCmId) for _ in range(5)]
    connecting = [loops.create_task(client.connect()) for client in clients[:3]]
    waiting = await listener.migrate(None)
    await loops.to_thread(loops.runner_of_this_kind(), lambda: serve(waiting))
    assert answered == 3
    listener = await returned[0].migrate()
    connecting += [loops.create_task(client.connect()) for client in clients[3:]]
    for _ in range(2):
        server = await listener.get_request()
        server.reject()
        await server.aclose()
    await loops.gather(*connecting, return_exceptions=True)
    await close(*clients, listener)


def keep_connecting(where: tuple[str, int], migrated: list[int]) -> loops.Task[object]:
    """Start three tasks that connect at least eight times each, and until the listener has migrated
    more than once. They check that it rejects each request, in whichever loop it is.
    """

    async def connect_and_be_rejected() -> None:
        attempts = 0
        while attempts < 8 or len(migrated) < 2:
            async with await resolved(where, AsyncCmId) as client:
                with pytest.raises(aiordma.Rejected) as rejected:
                    await client.connect()
                assert rejected.value.private_data.startswith(b"heard")
            attempts += 1

    return loops.create_task(loops.gather(*(connect_and_be_rejected() for _ in range(3))))


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
async def test_migrating_back_and_forth_under_load(address: DeviceAddress, host: str) -> None:
    """Clients keep connecting while the listener migrates. Each of them is rejected."""
    listener = await listening(replace(address, host=host or address.host), AsyncCmId)
    where = (address.host, listener.local_address[1])
    migrated: list[int] = []
    connecting = keep_connecting(where, migrated)
    while not connecting.done():
        waiting = await listener.migrate(None)
        await reject_for(waiting, 0.01 * (len(migrated) % 5))
        listener = await waiting.migrate()
        await reject_for(listener, 0.05)
        migrated.append(len(migrated))
    await connecting
    assert len(migrated) > 1
    await listener.aclose()


async def test_migrating_between_two_loops_under_load(address: DeviceAddress) -> None:
    """Two threads with a loop each pass a listener to each other. Each client is rejected."""
    there: deque[SyncCmId | None] = deque()
    back: deque[SyncCmId] = deque()

    async def serve_there() -> None:
        while (waiting := await next_of(there)) is not None:
            listener = await waiting.migrate()
            await reject_for(listener, 0.05)
            back.append(await listener.migrate(None))

    listener = await listening(address, AsyncCmId)
    serving = loops.create_task(loops.to_thread(loops.runner_of_this_kind(), serve_there))
    migrated: list[int] = []
    connecting = keep_connecting(listener.local_address, migrated)
    while not connecting.done():
        there.append(await listener.migrate(None))
        listener = await (await next_of(back)).migrate()
        await reject_for(listener, 0.05)
        migrated.append(len(migrated))
    there.append(None)
    await serving
    await connecting
    assert len(migrated) > 1
    await listener.aclose()


async def next_of(queue: deque[T]) -> T:
    """Wait for the next element that the other thread appends."""
    await loops.until(lambda: queue, "the other thread to append an element")
    return queue.popleft()


async def reject_for(listener: CmId, seconds: float) -> None:
    """Reject every request for `seconds`. Time is the subject: it selects the moment to migrate."""
    try:
        async with loops.timeout(seconds):
            while True:
                request = await listener.get_request()
                request.reject(b"heard")
                request.abort()
    except TimeoutError:
        pass


async def test_endpoints_become_a_connection_and_a_listener(any_address: DeviceAddress) -> None:
    """rdma_create_ep(3) creates both sides. They then become a Connection and a Listener."""
    passive = AddrInfo(flags=AddrInfoFlags.PASSIVE, source=parse_address(any_address.host))
    served = await SyncCmId.create_ep(passive, init=SMALL)
    async with aiordma.Listener.from_id(served) as listener:
        info = AddrInfo(destination=parse_address(*listener.local_address))
        for init in (None, SMALL):
            endpoint = await SyncCmId.create_ep(info, init=init)
            accepting = loops.create_task(listener.accept(b"welcome"))
            near = await Connection.from_id(endpoint, private_data=b"hello")
            async with near, await accepting as far:
                assert near.private_data.rstrip(b"\0") == b"welcome"
                assert far.private_data.rstrip(b"\0") == b"hello"
                await near.send(b"there")
                assert await far.recv() == b"there"
                await far.send(b"and back")
                assert await near.recv() == b"and back"


async def test_a_request_becomes_a_connection(any_address: DeviceAddress) -> None:
    async with await listening(any_address, SyncCmId) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        server = await Connection.from_id(await listener.get_request())
        async with server, await connecting as client:
            await client.send(b"hello")
            assert await server.recv() == b"hello"


async def test_an_unresolved_id_cannot_become_a_connection(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as cm:
        with pytest.raises(aiordma.RdmaError, match="IDLE"):
            await Connection.from_id(cm)
        cm.bind_addr(parse_address(address.host))
