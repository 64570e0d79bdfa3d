"""The state after a cancelled await: connecting, serving, closing."""

from __future__ import annotations

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import connected, pending_requests

import aiordma
from aiordma import Connection, LocalClosed, PeerClosed, Rejected, SyncCmId
from aiordma.cm import AsyncCmId, CmState
from aiordma.rdmacm import DeviceAddress, parse_address


async def opened(where: tuple[str, int]) -> Connection:
    return await aiordma.connect(*where)


async def resolved(where: tuple[str, int]) -> AsyncCmId:
    cm = await AsyncCmId.create()
    await cm.resolve_addr(parse_address(*where))
    await cm.resolve_route()
    return cm


@pytest.mark.awaits("connect")
async def test_cancelled_connect_leaves_nothing(address: DeviceAddress) -> None:
    """Nothing on this side. A listener can see the request of a peer that gave up."""
    async with aiordma.listen(address.host, 0) as listener:
        where = listener.local_address
        assert await cancelled(lambda: opened(where), begun=False)
        await cancel(lambda: opened(where))
        connecting = loops.create_task(opened(where))
        request = await listener.get_request()  # now connect() waits for the reply
        connecting.cancel()
        await loops.wait([connecting])
        assert connecting.cancelled()
        await request.reject()


@pytest.mark.awaits("Connection.from_id")
async def test_cancelled_from_id_closes_the_id(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        cm = await resolved(listener.local_address)
        await cancel(lambda: Connection.from_id(cm))
        assert cm.state is CmState.CLOSED


@pytest.mark.awaits("listen")
async def test_cancelled_listen_leaves_the_port_free(address: DeviceAddress) -> None:
    async with await aiordma.listen(address.host, 0) as listener:
        port = listener.local_address[1]
    assert await cancelled(lambda: aiordma.listen(address.host, port), begun=False)
    async with aiordma.listen(address.host, port) as listener:
        assert listener.local_address[1] == port


@pytest.mark.awaits("Listener.from_id")
async def test_cancelled_listener_from_id_leaves_a_synchronous_id_unchanged(
    address: DeviceAddress,
) -> None:
    async with await SyncCmId.create() as cm:
        cm.bind_addr(parse_address(address.host))
        await cancel(lambda: aiordma.Listener.from_id(cm))
        assert cm.state is CmState.ADDR_BOUND


@pytest.mark.awaits("Listener.get_request", "Listener.__anext__")
@pytest.mark.parametrize("get", [lambda listener: listener.get_request(), anext])
async def test_cancelled_get_request_loses_no_request(address: DeviceAddress, get: object) -> None:
    assert callable(get)
    async with aiordma.listen(address.host, 0) as listener:
        await cancel(lambda: get(listener))
        connecting = loops.create_task(opened(listener.local_address))
        await loops.until(lambda: pending_requests(listener), "the request to arrive")
        assert await cancelled(lambda: get(listener), begun=False)
        await (await get(listener)).reject()
        with pytest.raises(Rejected):
            await connecting


@pytest.mark.awaits("Listener.accept")
async def test_cancelled_accept_loses_only_the_peer_being_accepted(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        await cancel(listener.accept)
        peers = [loops.create_task(opened(listener.local_address)) for _ in range(2)]
        await loops.until(lambda: pending_requests(listener) == 2, "both requests to arrive")
        await cancel(listener.accept)
        async with await listener.accept() as accepted:
            await loops.wait(peers)
            connected_peers = [peer.result() for peer in peers if not peer.exception()]
            # The first peer can have been connected before its connection was ended.
            for connection in connected_peers:
                if connection.local_address == accepted.peer_address:
                    await connection.send(b"the other")
            assert await accepted.recv() == b"the other"
            for connection in connected_peers:
                await connection.aclose()


@pytest.mark.awaits("ConnectRequest.accept")
async def test_cancelled_accept_of_a_request_ends_the_connection(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(opened(listener.local_address))
        request = await listener.get_request()
        await cancel(request.accept)
        with pytest.raises(LocalClosed):
            await request.accept()
        with pytest.raises((aiordma.ConnectError, PeerClosed)):
            async with await connecting as connection:
                await connection.recv()


@pytest.mark.awaits("ConnectRequest.reject")
async def test_cancelled_reject_still_rejects(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(opened(listener.local_address))
        request = await listener.get_request()
        await cancelled(lambda: request.reject(b"no"))
        with pytest.raises(Rejected) as rejected:
            await connecting
        assert rejected.value.private_data.rstrip(b"\0") == b"no"


@pytest.mark.awaits("Listener.serve")
async def test_cancelled_serve_closes_the_listener_and_cancels_every_handler(
    address: DeviceAddress,
) -> None:
    ends: list[BaseException] = []
    served: list[Connection] = []

    async def handler(connection: Connection) -> None:
        served.append(connection)
        try:
            await connection.recv()
        except BaseException as error:
            ends.append(error)
            raise

    listener = await aiordma.listen(address.host, 0)
    serving = loops.create_task(listener.serve(handler))
    peers = [await opened(listener.local_address) for _ in range(2)]
    await loops.until(lambda: len(served) == 2, "both handlers to begin")
    serving.cancel()
    await loops.wait([serving])
    assert serving.cancelled()
    assert len(ends) == 2
    assert all(isinstance(end, loops.CancelledError) for end in ends)
    with pytest.raises(LocalClosed):
        await listener.get_request()
    for peer in peers:
        with pytest.raises(PeerClosed):
            await peer.recv()
        await peer.aclose()


@pytest.mark.awaits("Listener.aclose", "Listener.__aexit__")
async def test_cancelled_aclose_still_closes_a_listener(address: DeviceAddress) -> None:
    listener = await aiordma.listen(address.host, 0)
    await cancelled(listener.aclose)
    with pytest.raises(LocalClosed):
        await listener.get_request()
    await listener.aclose()


@pytest.mark.awaits("Connection.aclose")
async def test_cancelled_aclose_aborts_the_connection(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await cancelled(pair.client.aclose)
        assert pair.client._endpoint.released
        with pytest.raises(LocalClosed):
            await pair.client.send(b"x")
        with pytest.raises(PeerClosed):
            await pair.server.recv()


@pytest.mark.awaits("Connection.__aexit__")
async def test_cancelled_block_aborts_its_connection(address: DeviceAddress) -> None:
    async with connected(address) as pair:

        async def block() -> None:
            async with pair.client as connection:
                await connection.recv()

        await cancel(block)
        assert pair.client._endpoint.released
        with pytest.raises(PeerClosed):
            await pair.server.recv()


@pytest.mark.awaits("getaddrinfo")
async def test_cancelled_getaddrinfo_finishes_in_its_thread(address: DeviceAddress) -> None:
    await cancel(lambda: aiordma.getaddrinfo(address.host, 7471))


@pytest.mark.awaits("DeviceWatch.__aenter__", "DeviceWatch.__anext__", "DeviceWatch.__aexit__")
async def test_cancelled_block_ends_a_device_watch() -> None:
    """A test in test_device_events.py checks that a cancelled wait loses no event."""

    watching: list[aiordma.DeviceWatch] = []

    async def watch() -> None:
        async with aiordma.watch_devices() as events:
            watching.append(events)
            async for _ in events:  # events of the test before
                pass

    def waits() -> bool:
        return any(events._arrived is not None and len(events._arrived) for events in watching)

    await cancel(watch)
    task = loops.create_task(watch())
    await loops.until(waits, "the task to wait for an event")
    task.cancel()
    await loops.wait([task])
    assert task.cancelled()
