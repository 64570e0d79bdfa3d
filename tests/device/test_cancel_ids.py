"""The state after a cancelled await: ids of both kinds, call by call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from cm_ids import SMALL, CmId, Kind, both_kinds, close, connected, listening, resolved
from helpers import has_pending_event

from aiordma import AsyncCmId, LocalClosed, PortSpace, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import WcStatus
from aiordma.rdmacm import (
    AddrInfo,
    ConnectionParameters,
    DeviceAddress,
    SocketAddress,
    parse_address,
)
from aiordma.verbs import SharedReceiveQueueCaps

GROUP = SocketAddress("239.20.30.60", 0)


def both(*methods: str) -> pytest.MarkDecorator:
    """Mark a test with awaits() for methods of both kinds of ids."""
    names = [f"{kind}.{method}" for kind in ("AsyncCmId", "SyncCmId") for method in methods]
    return pytest.mark.awaits(*names)


@both("create")
@both_kinds
async def test_cancelled_create_leaves_nothing(address: DeviceAddress, kind: Kind) -> None:
    assert await cancelled(kind.create, begun=False)


@pytest.mark.awaits("SyncCmId.create_ep")
async def test_cancelled_create_ep_destroys_its_endpoint(address: DeviceAddress) -> None:
    info = AddrInfo(destination=parse_address(address.host, 1))
    await cancel(lambda: SyncCmId.create_ep(info))


@both("resolve_addr", "resolve_route", "set_path")
@both_kinds
async def test_id_can_be_closed_after_a_cancelled_resolve(
    address: DeviceAddress, kind: Kind
) -> None:
    destination = parse_address(address.host, 1)
    async with await kind.create() as cm:
        await cancelled(lambda: cm.resolve_addr(destination))
        await close(cm)
    async with await kind.create() as cm:
        assert await cancelled(lambda: cm.resolve_addr(destination), begun=False)
        await cm.resolve_addr(destination)  # the cancelled call had not begun
        assert await cancelled(lambda: cm.set_path(bytes(80)), begun=False)
        assert await cancelled(cm.resolve_route, begun=False)
        assert cm.state is CmState.ADDR_RESOLVED
        await cancelled(cm.resolve_route)
        await close(cm)


@both("connect", "accept")
@both_kinds
async def test_id_can_be_closed_after_a_cancelled_connect_or_accept(
    address: DeviceAddress, kind: Kind
) -> None:
    async with (
        await listening(address, kind) as listener,
        await resolved(listener.local_address, kind) as client,
    ):
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            await server.create_qp(SMALL)
            await cancel(server.accept)
            await close(server)
        connecting.cancel()
        await loops.wait([connecting])
        await close(client)


@both("resolve_and_connect")
@both_kinds
async def test_id_can_be_closed_after_a_cancelled_resolve_and_connect(
    address: DeviceAddress, kind: Kind
) -> None:
    async with await listening(address, kind) as listener, await kind.create() as client:
        await client.resolve_addr(parse_address(*listener.local_address))
        await client.create_qp(SMALL)
        connect = partial(client.resolve_and_connect, ConnectionParameters())
        assert await cancelled(connect, begun=False)
        connecting = loops.create_task(connect())
        async with await listener.get_request():
            connecting.cancel()
            await loops.wait([connecting])
        await close(client)


@both("disconnect")
@both_kinds
async def test_cancelled_disconnect_continues(address: DeviceAddress, kind: Kind) -> None:
    async with connected(address, kind) as (client, server):
        server.cm_id.post_recv(1, await server.reg_msgs(bytearray(16)), 0, 16)
        await cancel(client.disconnect)
        assert (await server.get_recv_comp()).status is WcStatus.WR_FLUSH_ERR


@both("create_qp", "create_srq", "reg_msgs", "reg_read", "reg_write")
@both_kinds
async def test_objects_of_cancelled_calls_are_destroyed_with_the_id(
    address: DeviceAddress, kind: Kind
) -> None:
    steps: list[Callable[[CmId], Awaitable[Any]]] = [
        lambda cm: cm.create_srq(SharedReceiveQueueCaps(max_wr=4)),
        lambda cm: cm.reg_msgs(bytearray(100)),
        lambda cm: cm.reg_read(bytearray(100)),
        lambda cm: cm.reg_write(bytearray(100)),
        lambda cm: cm.create_qp(SMALL),
    ]
    async with await kind.create() as cm:
        await cm.resolve_addr(parse_address(address.host, 1))
        for step in steps:
            await cancel(partial(step, cm))
        await close(cm)


@both("get_send_comp", "get_recv_comp")
@both_kinds
async def test_cancelled_wait_loses_no_completion(address: DeviceAddress, kind: Kind) -> None:
    async with connected(address, kind) as (client, server):
        server.cm_id.post_recv(1, await server.reg_msgs(bytearray(16)), 0, 16)
        await cancel(server.get_recv_comp)
        await cancel(client.get_send_comp)
        client.cm_id.post_send(2, await client.reg_msgs(bytearray(5)), 0, 5)
        assert (await client.get_send_comp()).check().wr_id == 2
        assert await cancelled(server.get_recv_comp, begun=False)
        assert (await server.get_recv_comp()).check().byte_len == 5


@both("get_request", "__anext__")
@both_kinds
async def test_cancelled_get_request_loses_no_request(address: DeviceAddress, kind: Kind) -> None:
    async with (
        await listening(address, kind) as listener,
        await resolved(listener.local_address, kind) as client,
    ):
        await cancel(listener.get_request)
        await cancel(lambda: anext(listener))
        connecting = loops.create_task(client.connect())
        await loops.until(lambda: has_pending_event(listener), "the request to arrive")
        await cancelled(listener.get_request, begun=False)
        async with await listener.get_request() as server:
            server.reject()
        await loops.wait([connecting])


@both("join_multicast", "leave_multicast")
@both_kinds
@pytest.mark.transport("IB")
async def test_groups_of_cancelled_calls_are_left_with_the_id(
    address: DeviceAddress, kind: Kind
) -> None:
    async with await kind.create(PortSpace.UDP) as cm:
        cm.bind_addr(parse_address(address.host))
        await cancelled(lambda: cm.join_multicast(GROUP))
        await close(cm)
    async with await kind.create(PortSpace.UDP) as cm:
        cm.bind_addr(parse_address(address.host))
        await cm.join_multicast(GROUP)
        await cancel(lambda: cm.leave_multicast(GROUP))
        await close(cm)


@both("migrate")
@both_kinds
async def test_cancelled_migrate_leaves_the_id_unchanged(
    address: DeviceAddress, kind: Kind
) -> None:
    async with await listening(address, kind) as listener:
        migrate = listener.migrate
        arguments: tuple[None, ...] = (None,) if kind is AsyncCmId else ()
        await cancel(lambda: migrate(*arguments))
        assert listener.state is CmState.LISTENING
        moved = await migrate(*arguments)
        with pytest.raises(LocalClosed):
            await listener.get_request()
        await moved.aclose()


@both("aclose", "__aexit__")
@both_kinds
async def test_cancelled_aclose_still_closes_an_id(address: DeviceAddress, kind: Kind) -> None:
    cm = await kind.create()
    await cancelled(cm.aclose)
    assert cm.state is CmState.CLOSED
    await cm.aclose()
