"""The state after a cancelled await: datagrams and multicast groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from datagram_pairs import endpoints, two_endpoints
from helpers import has_pending_event

import aiordma
from aiordma import DatagramEndpoint, LocalClosed, MulticastGroup, Rejected
from aiordma.rdmacm import DeviceAddress

pytestmark = pytest.mark.transport("IB")

GROUP = "239.20.30.50"


@pytest.mark.awaits("open_datagram")
async def test_cancelled_open_datagram_leaves_the_port_free(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        where = endpoint.local_address
    assert await cancelled(lambda: aiordma.open_datagram(where), begun=False)
    await cancel(lambda: aiordma.open_datagram(where))


@pytest.mark.awaits("DatagramEndpoint.resolve")
async def test_cancelled_resolve_leaves_nothing(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        resolving = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        await loops.cancel(resolving)
        assert await cancelled(lambda: one.resolve(*other.local_address), begun=False)
        await request.reject()
        assert not [cm for cm in one._queue_pair._other_ids if cm.state.name != "CLOSED"]


@pytest.mark.awaits("DatagramEndpoint.get_request")
async def test_cancelled_get_request_loses_no_request(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        await cancel(other.get_request)
        resolving = loops.create_task(one.resolve(*other.local_address))
        await loops.until(lambda: has_pending_event(other._queue_pair.cm), "the request to arrive")
        assert await cancelled(other.get_request, begun=False)
        await (await other.get_request()).accept()
        await resolving


@pytest.mark.awaits("DatagramRequest.accept", "DatagramRequest.reject")
async def test_cancelled_accept_or_reject_still_answers(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        resolving = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        await cancel(request.accept)
        assert (await resolving).qp_num == other.qp_num
        resolving = loops.create_task(one.resolve(*other.local_address))
        request = await other.get_request()
        await cancelled(request.reject)
        with pytest.raises(Rejected):
            await resolving


@pytest.mark.awaits("DatagramEndpoint.serve")
async def test_cancelled_serve_leaves_the_endpoint_listening(address: DeviceAddress) -> None:
    async with two_endpoints(address) as (one, other):
        await cancel(other.serve)
        resolving = loops.create_task(one.resolve(*other.local_address))
        await (await other.get_request()).accept()
        await resolving


@pytest.mark.awaits("DatagramEndpoint.send_to")
async def test_cancelled_send_to_sends_nothing(address: DeviceAddress) -> None:
    async with endpoints(address) as (one, other, peer):
        assert await cancelled(lambda: one.send_to(peer, b"never"), begun=False)
        await cancel(lambda: one.send_to(peer, b"never"))  # its address handle does not exist yet
        await one.send_to(peer, b"sent")
        assert (await other.recv_from()).data == b"sent"


@pytest.mark.awaits("DatagramEndpoint.recv_from", "DatagramEndpoint.__anext__")
@pytest.mark.parametrize("receive", [DatagramEndpoint.recv_from, anext])
async def test_cancelled_receive_loses_no_datagram(
    address: DeviceAddress, receive: Callable[[DatagramEndpoint], Any]
) -> None:
    async with endpoints(address) as (one, other, peer):
        await cancel(lambda: receive(other))
        await one.send_to(peer, b"kept")
        ring = other._queue_pair.receive_ring
        await loops.until(lambda: len(ring), "the datagram to arrive")
        assert await cancelled(lambda: receive(other), begun=False)
        assert (await receive(other)).data == b"kept"


@pytest.mark.awaits("DatagramEndpoint.join")
async def test_cancelled_join_leaves_nothing(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as one:
        await cancel(lambda: one.join(GROUP))
        async with await one.join(GROUP) as group:
            assert group.joined


@pytest.mark.awaits("DatagramEndpoint.leave", "MulticastGroup.leave", "MulticastGroup.__aexit__")
async def test_cancelled_leave_still_leaves_the_group(address: DeviceAddress) -> None:
    async with aiordma.open_datagram((address.host, 0)) as one:
        for leave in (one.leave, MulticastGroup.leave):
            group = await one.join(GROUP)
            await cancel(partial(leave, group))
            assert not group.joined
            await group.leave()


@pytest.mark.awaits("DatagramEndpoint.aclose", "DatagramEndpoint.__aexit__")
async def test_cancelled_aclose_aborts_the_endpoint(address: DeviceAddress) -> None:
    endpoint = await aiordma.open_datagram((address.host, 0))
    await cancelled(endpoint.aclose)
    with pytest.raises(LocalClosed):
        await endpoint.recv_from()
    await endpoint.aclose()
