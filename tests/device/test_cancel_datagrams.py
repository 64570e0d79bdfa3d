"""What a cancelled await leaves behind: datagrams and groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import TIME_LIMIT

import aiordma
from aiordma import DatagramEndpoint, DatagramOptions, DatagramPeer, LocalClosed, Rejected
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.transport("IB")

GROUP = "239.20.30.50"


@asynccontextmanager
async def two(address: DeviceAddress) -> AsyncIterator[tuple[DatagramEndpoint, DatagramEndpoint]]:
    """An endpoint, and another that listens."""
    async with (
        loops.timeout(TIME_LIMIT),
        aiordma.open_datagram((address.host, 0)) as one,
        aiordma.open_datagram((address.host, 0)) as other,
    ):
        other.listen()
        yield one, other


async def peer_of(one: DatagramEndpoint, other: DatagramEndpoint) -> DatagramPeer:
    asking = loops.create_task(one.resolve(*other.local_address))
    await (await other.get_request()).accept()
    return await asking


@pytest.mark.awaits("open_datagram")
async def test_opening_leaves_the_port_free(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        where = endpoint.local_address
    assert await cancelled(lambda: aiordma.open_datagram(where), begun=False)
    await cancel(lambda: aiordma.open_datagram(where))


@pytest.mark.awaits("DatagramEndpoint.resolve")
async def test_asking_for_a_peer_leaves_nothing(address: DeviceAddress) -> None:
    async with two(address) as (one, other):
        asking = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        asking.cancel()
        await loops.wait([asking])
        assert asking.cancelled()
        assert await cancelled(lambda: one.resolve(*other.local_address), begun=False)
        await request.reject()
        assert not [cm for cm in one._queue_pair._other_ids if cm.state.name != "CLOSED"]


@pytest.mark.awaits("DatagramEndpoint.get_request")
async def test_waiting_for_a_request_loses_none(address: DeviceAddress) -> None:
    async with two(address) as (one, other):
        await cancel(other.get_request)
        asking = loops.create_task(one.resolve(*other.local_address))
        while not other._queue_pair.cm._requests:
            await loops.sleep(0.01)
        assert await cancelled(other.get_request, begun=False)
        await (await other.get_request()).accept()
        await asking


@pytest.mark.awaits("DatagramRequest.accept", "DatagramRequest.reject")
async def test_an_answer_is_not_taken_back(address: DeviceAddress) -> None:
    async with two(address) as (one, other):
        asking = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        await cancel(request.accept)
        assert (await asking).qp_num == other.qp_num
        asking = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        await cancelled(request.reject)
        with pytest.raises(Rejected):
            await asking


@pytest.mark.awaits("DatagramEndpoint.serve")
async def test_serve_stops_accepting_and_listens_on(address: DeviceAddress) -> None:
    async with two(address) as (one, other):
        await cancel(other.serve)
        asking = loops.create_task(one.resolve(*other.local_address))
        await (await other.get_request()).accept()
        await asking


@pytest.mark.awaits("DatagramEndpoint.send_to")
async def test_a_datagram_that_waited_is_not_sent(address: DeviceAddress) -> None:
    async with two(address) as (one, other):
        peer = await peer_of(one, other)
        assert await cancelled(lambda: one.send_to(peer, b"never"), begun=False)
        await cancel(lambda: one.send_to(peer, b"never"))  # the way is not found yet
        await one.send_to(peer, b"sent")
        assert (await other.recv_from()).data == b"sent"


@pytest.mark.awaits("DatagramEndpoint.recv_from", "DatagramEndpoint.__anext__")
@pytest.mark.parametrize("receive", [DatagramEndpoint.recv_from, anext])
async def test_receiving_loses_no_datagram(
    address: DeviceAddress, receive: Callable[[DatagramEndpoint], Any]
) -> None:
    async with two(address) as (one, other):
        peer = await peer_of(one, other)
        await cancel(lambda: receive(other))
        await one.send_to(peer, b"kept")
        while not len(other._queue_pair.receive_ring):
            await loops.sleep(0.001)
        assert await cancelled(lambda: receive(other), begun=False)
        assert (await receive(other)).data == b"kept"


@pytest.mark.awaits("DatagramEndpoint.join")
async def test_a_join_leaves_nothing(address: DeviceAddress) -> None:
    async with two(address) as (one, _):
        await cancel(lambda: one.join(GROUP))
        async with await one.join(GROUP) as group:
            assert group.joined


@pytest.mark.awaits("DatagramEndpoint.leave", "MulticastGroup.leave", "MulticastGroup.__aexit__")
async def test_a_group_is_left_all_the_same(address: DeviceAddress) -> None:
    async with two(address) as (one, _):
        for leave in (lambda group: one.leave(group), lambda group: group.leave()):
            group = await one.join(GROUP)
            await cancel(lambda leave=leave, group=group: leave(group))
            assert not group.joined
            await group.leave()


@pytest.mark.awaits("DatagramEndpoint.aclose", "DatagramEndpoint.__aexit__")
async def test_an_endpoint_is_closed_by_force(address: DeviceAddress) -> None:
    endpoint = await aiordma.open_datagram((address.host, 0), options=DatagramOptions())
    await cancelled(endpoint.aclose)
    with pytest.raises(LocalClosed):
        await endpoint.recv_from()
    await endpoint.aclose()
