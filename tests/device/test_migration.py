"""Migration: ids go from a loop to threads and back, and to other loops; nothing is lost."""

from __future__ import annotations

import queue
import threading

import loops
import pytest
from helpers import TIME_LIMIT

import aiordma
from aiordma import AsyncCmId, BusyError, Connection, LocalClosed, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import AddrInfoFlags
from aiordma.rdmacm import AddrInfo, DeviceAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

SMALL = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)


async def sync_listener(address: DeviceAddress) -> SyncCmId:
    listener = await SyncCmId.create()
    listener.bind_addr(parse_address(address.host))
    listener.listen()
    return listener


async def async_listener(address: DeviceAddress, host: str | None = None) -> AsyncCmId:
    listener = await AsyncCmId.create()
    listener.bind_addr(parse_address(host or address.host))
    listener.listen()
    return listener


async def resolved(address: DeviceAddress, port: int) -> AsyncCmId:
    client = await AsyncCmId.create()
    await client.resolve_addr(parse_address(address.host, port))
    await client.resolve_route()
    await client.create_qp(SMALL)
    return client


async def connected_ids(address: DeviceAddress, listener: AsyncCmId) -> tuple[AsyncCmId, AsyncCmId]:
    client = await resolved(address, listener.local_address[1])
    connecting = loops.create_task(client.connect())
    server = await listener.get_request()
    await server.create_qp(SMALL)
    await server.accept()
    await connecting
    return client, server


async def test_there_and_back_at_every_step(any_address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), await async_listener(any_address) as listener:
        port = listener.local_address[1]
        client = await SyncCmId.create()
        await client.resolve_addr(parse_address(any_address.host, port))
        moved = await client.migrate()
        assert moved.state is CmState.ADDR_RESOLVED
        await moved.resolve_route()
        client = await moved.migrate(None)
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        request = await (await listener.get_request()).migrate(None)
        await request.create_qp(SMALL)
        await request.accept()
        await connecting
        moved = await client.migrate()
        server = await request.migrate()
        assert moved.state is server.state is CmState.CONNECTED
        await loops.gather(moved.disconnect(), server.disconnect())
        await moved.aclose()
        await server.aclose()


async def test_what_was_migrated_is_closed(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT):
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


async def test_an_id_that_somebody_waits_for_stays(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT):
        for listener in (await sync_listener(address), await async_listener(address)):
            waiting = loops.create_task(listener.get_request())
            await loops.sleep(0.05)
            with pytest.raises(BusyError):
                await listener.migrate(*(() if isinstance(listener, SyncCmId) else (None,)))
            assert listener.state is CmState.LISTENING
            await listener.aclose()
            with pytest.raises(LocalClosed):
                await waiting


async def test_requests_pending_at_a_listener_go_along(address: DeviceAddress) -> None:
    """They come at any moment around two migrations."""
    async with loops.timeout(TIME_LIMIT):
        listener = await async_listener(address)
        port = listener.local_address[1]
        clients = [await resolved(address, port) for _ in range(6)]
        connecting = [loops.create_task(client.connect()) for client in clients[:2]]
        while not listener._requests:
            await loops.sleep(0.01)
        waiting = await listener.migrate(None)
        connecting += [loops.create_task(client.connect()) for client in clients[2:4]]
        await loops.sleep(0.1)  # nobody reads these
        listener = await waiting.migrate()
        connecting += [loops.create_task(client.connect()) for client in clients[4:]]
        for _ in clients:
            server = await listener.get_request()
            server.reject(b"later")
            await server.aclose()
        answers = await loops.gather(*connecting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [aiordma.Rejected] * 6
        for cm in (*clients, listener):
            await cm.aclose()


async def test_a_disconnect_pending_goes_along(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), await async_listener(address) as listener:
        client, server = await connected_ids(address, listener)
        waiting = await client.migrate(None)
        await server.aclose()
        await loops.sleep(0.2)  # the event waits in the kernel
        client = await waiting.migrate()
        while client.state is CmState.CONNECTED:
            await loops.sleep(0.01)
        assert client.state is CmState.DISCONNECTED
        await client.aclose()


async def test_from_one_loop_to_another_in_another_thread(address: DeviceAddress) -> None:
    """A listener serves in one thread's loop, then in another's; no request is lost between."""
    handed = queue.Queue[SyncCmId]()
    answered = 0

    async def serve(waiting: SyncCmId) -> None:
        nonlocal answered
        listener = await waiting.migrate()
        for _ in range(3):
            server = await listener.get_request()
            server.reject(b"elsewhere")
            await server.aclose()
            answered += 1
        back = await listener.migrate(None)
        handed.put(back)

    async with loops.timeout(TIME_LIMIT):
        listener = await async_listener(address)
        clients = [await resolved(address, listener.local_address[1]) for _ in range(5)]
        connecting = [loops.create_task(client.connect()) for client in clients[:3]]
        waiting = await listener.migrate(None)
        thread = threading.Thread(
            target=loops.runner_of_this_kind(), args=(lambda: serve(waiting),)
        )
        thread.start()
        back = await loops.to_thread(handed.get)
        await loops.to_thread(thread.join)
        assert answered == 3
        listener = await back.migrate()
        connecting += [loops.create_task(client.connect()) for client in clients[3:]]
        for _ in range(2):
            server = await listener.get_request()
            server.reject()
            await server.aclose()
        await loops.gather(*connecting, return_exceptions=True)
        for cm in (*clients, listener):
            await cm.aclose()


async def ask(address: DeviceAddress, port: int) -> None:
    """Connect, and be refused by whoever holds the listener at the moment."""
    async with await resolved(address, port) as client:
        with pytest.raises(aiordma.Rejected) as rejected:
            await client.connect()
        assert rejected.value.private_data.startswith(b"heard")


async def keep_asking(address: DeviceAddress, port: int, moved: list[int]) -> None:
    """Until the listener has moved more than once, however quick the answers come."""
    asked = 0
    while asked < 8 or len(moved) < 2:
        await ask(address, port)
        asked += 1


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
async def test_migrating_back_and_forth_under_load(address: DeviceAddress, host: str) -> None:
    """Clients keep asking while the listener moves; every one of them is answered."""
    async with loops.timeout(2 * TIME_LIMIT):
        listener = await async_listener(address, host)
        port = listener.local_address[1]
        moved: list[int] = []
        asking = loops.create_task(
            loops.gather(*(keep_asking(address, port, moved) for _ in range(3)))
        )
        while not asking.done():
            waiting = await listener.migrate(None)
            await answer_within(waiting, 0.01 * (len(moved) % 5))
            listener = await waiting.migrate()
            await answer_within(listener, 0.05)
            moved.append(len(moved))
        await asking
        assert len(moved) > 1
        await listener.aclose()


async def test_moving_between_two_loops_under_load(address: DeviceAddress) -> None:
    """Two threads, each with a loop, hand a listener to each other; every client is answered."""
    there, back = queue.Queue[SyncCmId | None](), queue.Queue[SyncCmId]()

    async def serve_there() -> None:
        while (waiting := await loops.to_thread(there.get)) is not None:
            listener = await waiting.migrate()
            await answer_within(listener, 0.05)
            back.put(await listener.migrate(None))

    async with loops.timeout(2 * TIME_LIMIT):
        listener = await async_listener(address)
        port = listener.local_address[1]
        thread = threading.Thread(
            target=loops.runner_of_this_kind(), args=(serve_there,), daemon=True
        )
        thread.start()
        moved: list[int] = []
        asking = loops.create_task(
            loops.gather(*(keep_asking(address, port, moved) for _ in range(3)))
        )
        while not asking.done():
            there.put(await listener.migrate(None))
            listener = await (await loops.to_thread(back.get)).migrate()
            await answer_within(listener, 0.05)
            moved.append(len(moved))
        there.put(None)
        await loops.to_thread(thread.join)
        await asking
        assert len(moved) > 1
        await listener.aclose()


async def answer_within(listener: AsyncCmId | SyncCmId, seconds: float) -> None:
    try:
        async with loops.timeout(seconds):
            while True:
                request = await listener.get_request()
                request.reject(b"heard")
                request.abort()
    except TimeoutError:
        pass


async def test_a_connection_from_an_endpoint(any_address: DeviceAddress) -> None:
    """Both sides are made by rdma_create_ep(), then carried on as Connection and Listener."""
    passive = AddrInfo(flags=AddrInfoFlags.PASSIVE, source=parse_address(any_address.host))
    async with loops.timeout(TIME_LIMIT):
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


async def test_a_connection_from_a_request(any_address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), await sync_listener(any_address) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        server = await Connection.from_id(await listener.get_request())
        async with server, await connecting as client:
            await client.send(b"hello")
            assert await server.recv() == b"hello"


async def test_an_id_that_is_not_ready_makes_no_connection(address: DeviceAddress) -> None:
    async with loops.timeout(TIME_LIMIT), await AsyncCmId.create() as cm:
        with pytest.raises(aiordma.RdmaError, match="IDLE"):
            await Connection.from_id(cm)
        cm.bind_addr(parse_address(address.host))
