"""The state after a cancelled await: connecting, serving and closing of both APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import loops
import pytest
from cancelling import cancel, cancelled
from cm_ids import resolved
from helpers import connected, pending_requests
from streaming import message_streams, streaming

import aiordma
from aiordma import (
    ByteStream,
    Connection,
    LocalClosed,
    MessageStream,
    PeerClosed,
    Rejected,
    SyncCmId,
)
from aiordma.cm import AsyncCmId, CmState
from aiordma.rdmacm import DeviceAddress, parse_address


class Api(NamedTuple):
    """The functions that make connections or streams, and the method that receives."""

    connect: Callable[..., Any]
    listen: Callable[..., Any]
    connected: Callable[[DeviceAddress], AbstractAsyncContextManager[Any]]
    receive: Callable[[Any], Awaitable[bytes]]
    reason: tuple[bytes, ...]
    """The arguments of reject()."""


MESSAGES = Api(aiordma.connect, aiordma.listen, connected, Connection.recv, (b"no",))
STREAMS = Api(aiordma.connect_stream, aiordma.listen_stream, streaming, ByteStream.receive, ())
ANY_SIZE = Api(
    aiordma.connect_messages,
    aiordma.listen_messages,
    message_streams,
    MessageStream.recv,
    (b"no",),
)
each_api = pytest.mark.parametrize(
    "api", [MESSAGES, STREAMS, ANY_SIZE], ids=["messages", "streams", "any size"]
)


@pytest.mark.awaits("connect", "connect_stream", "connect_messages")
@each_api
async def test_cancelled_connect_leaves_nothing(address: DeviceAddress, api: Api) -> None:
    """Nothing on this side. A listener can see the request of a peer that gave up."""
    async with api.listen(address.host, 0) as listener:
        where = listener.local_address
        assert await cancelled(lambda: api.connect(*where), begun=False)
        await cancel(lambda: api.connect(*where))
        connecting = loops.create_task(api.connect(*where))
        request = await listener.get_request()  # now connect() waits for the reply
        await loops.cancel(connecting)
        await request.reject()


@pytest.mark.awaits("Connection.from_id")
async def test_cancelled_from_id_closes_the_id(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        cm = await resolved(listener.local_address, AsyncCmId, init=None)
        await cancel(lambda: Connection.from_id(cm))
        assert cm.state is CmState.CLOSED


@pytest.mark.awaits("listen", "Listener.aclose", "Listener.__aexit__")
@pytest.mark.awaits("listen_stream", "StreamListener.aclose", "StreamListener.__aexit__")
@pytest.mark.awaits("listen_messages", "MessageListener.aclose", "MessageListener.__aexit__")
@each_api
async def test_cancelled_listen_or_aclose_leaves_the_port_free(
    address: DeviceAddress, api: Api
) -> None:
    listener = await api.listen(address.host, 0)
    where = listener.local_address
    await cancelled(listener.aclose)
    with pytest.raises(LocalClosed):
        await listener.get_request()
    await listener.aclose()
    assert await cancelled(lambda: api.listen(*where), begun=False)
    async with api.listen(*where) as again:
        assert again.local_address == where


@pytest.mark.awaits("Listener.from_id")
async def test_cancelled_listener_from_id_leaves_a_synchronous_id_unchanged(
    address: DeviceAddress,
) -> None:
    async with await SyncCmId.create() as cm:
        cm.bind_addr(parse_address(address.host))
        await cancel(lambda: aiordma.Listener.from_id(cm))
        assert cm.state is CmState.ADDR_BOUND


@pytest.mark.awaits("Listener.get_request", "Listener.__anext__")
@pytest.mark.awaits("StreamListener.get_request", "StreamListener.__anext__")
@pytest.mark.awaits("MessageListener.get_request", "MessageListener.__anext__")
@pytest.mark.parametrize("get", [lambda listener: listener.get_request(), anext])
@each_api
async def test_cancelled_get_request_loses_no_request(
    address: DeviceAddress, api: Api, get: Callable[[Any], Any]
) -> None:
    async with api.listen(address.host, 0) as listener:
        await cancel(lambda: get(listener))
        connecting = loops.create_task(api.connect(*listener.local_address))
        await loops.until(lambda: pending_requests(listener), "the request to arrive")
        assert await cancelled(lambda: get(listener), begun=False)
        await (await get(listener)).reject()
        with pytest.raises(Rejected):
            await connecting


@pytest.mark.awaits("Listener.accept", "StreamListener.accept", "MessageListener.accept")
@each_api
async def test_cancelled_accept_loses_only_the_peer_being_accepted(
    address: DeviceAddress, api: Api
) -> None:
    async with api.listen(address.host, 0) as listener:
        await cancel(listener.accept)
        peers = [loops.create_task(api.connect(*listener.local_address)) for _ in range(2)]
        await loops.until(lambda: pending_requests(listener) == 2, "both requests to arrive")
        await cancel(listener.accept)
        async with await listener.accept() as accepted:
            await loops.wait(peers)
            connected_peers = [peer.result() for peer in peers if not peer.exception()]
            # The first peer can have been connected before its connection was ended.
            for peer in connected_peers:
                if peer.local_address == accepted.peer_address:
                    await peer.send(b"the other")
            assert await api.receive(accepted) == b"the other"
            for peer in connected_peers:
                await peer.aclose()


@pytest.mark.awaits("ConnectRequest.accept", "StreamRequest.accept", "MessageRequest.accept")
@each_api
async def test_cancelled_accept_of_a_request_ends_the_connection(
    address: DeviceAddress, api: Api
) -> None:
    async with api.listen(address.host, 0) as listener:
        connecting = loops.create_task(api.connect(*listener.local_address))
        request = await listener.get_request()
        await cancel(request.accept)
        with pytest.raises(LocalClosed):
            await request.accept()
        with pytest.raises((aiordma.ConnectError, PeerClosed)):
            async with await connecting as client:
                await api.receive(client)


@pytest.mark.awaits("ConnectRequest.reject", "StreamRequest.reject", "MessageRequest.reject")
@each_api
async def test_cancelled_reject_still_rejects(address: DeviceAddress, api: Api) -> None:
    async with api.listen(address.host, 0) as listener:
        connecting = loops.create_task(api.connect(*listener.local_address))
        request = await listener.get_request()
        await cancelled(lambda: request.reject(*api.reason))
        with pytest.raises(Rejected) as rejected:
            await connecting
        assert rejected.value.private_data.rstrip(b"\0") == b"".join(api.reason)


@pytest.mark.awaits("Listener.serve", "StreamListener.serve", "MessageListener.serve")
@each_api
async def test_cancelled_serve_closes_the_listener_and_cancels_every_handler(
    address: DeviceAddress, api: Api
) -> None:
    ends: list[BaseException] = []
    served: list[Any] = []

    async def handler(connection: Any) -> None:
        served.append(connection)
        try:
            await api.receive(connection)
        except BaseException as error:
            ends.append(error)
            raise

    listener = await api.listen(address.host, 0)
    serving = loops.create_task(listener.serve(handler))
    peers = [await api.connect(*listener.local_address) for _ in range(2)]
    await loops.until(lambda: len(served) == 2, "both handlers to begin")
    await loops.cancel(serving)
    assert len(ends) == 2
    assert all(isinstance(end, loops.CancelledError) for end in ends)
    with pytest.raises(LocalClosed):
        await listener.get_request()
    for peer in peers:
        with pytest.raises(PeerClosed):
            await api.receive(peer)
        await peer.aclose()


@pytest.mark.awaits("Connection.aclose")
async def test_cancelled_aclose_aborts_the_connection(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await cancelled(pair.client.aclose)
        assert pair.client._endpoint.released
        with pytest.raises(LocalClosed):
            await pair.client.send(b"x")
        with pytest.raises(PeerClosed):
            await pair.server.recv()


@pytest.mark.awaits("Connection.__aexit__", "ByteStream.__aexit__", "MessageStream.__aexit__")
@each_api
async def test_cancelled_block_aborts_its_connection(address: DeviceAddress, api: Api) -> None:
    async with api.connected(address) as pair:

        async def block() -> None:
            async with pair.client as connection:
                await api.receive(connection)

        await cancel(block)
        assert pair.client._endpoint.released
        with pytest.raises(PeerClosed):
            await api.receive(pair.server)


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
    await loops.cancel(task)
