"""What a cancelled await leaves behind: ids, one step after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from cancelling import cancel, cancelled
from helpers import TIME_LIMIT

from aiordma import AsyncCmId, LocalClosed, PortSpace, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import WcStatus
from aiordma.rdmacm import AddrInfo, DeviceAddress, SocketAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit, SharedReceiveQueueCaps

SMALL = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)
GROUP = SocketAddress("239.20.30.60", 0)

CmId = AsyncCmId | SyncCmId
Kind = type[AsyncCmId] | type[SyncCmId]
kinds = pytest.mark.parametrize("kind", [AsyncCmId, SyncCmId])


def both(*methods: str) -> pytest.MarkDecorator:
    names = [f"{kind}.{method}" for kind in ("AsyncCmId", "SyncCmId") for method in methods]
    return pytest.mark.awaits(*names)


@asynccontextmanager
async def listening(address: DeviceAddress, kind: Kind) -> AsyncIterator[CmId]:
    async with loops.timeout(TIME_LIMIT), await kind.create() as listener:
        listener.bind_addr(parse_address(address.host))
        listener.listen()
        yield listener


@asynccontextmanager
async def resolved(address: DeviceAddress, kind: Kind, listener: CmId) -> AsyncIterator[CmId]:
    async with await kind.create() as client:
        await client.resolve_addr(parse_address(address.host, listener.local_address[1]))
        await client.resolve_route()
        yield client


async def close(cm: CmId) -> None:
    """What was begun is over, and nothing of it is left; the fixture counts."""
    await cm.aclose()
    assert cm.state is CmState.CLOSED


@both("create")
@kinds
async def test_create_leaves_nothing(address: DeviceAddress, kind: Kind) -> None:
    assert await cancelled(kind.create, begun=False)


@pytest.mark.awaits("SyncCmId.create_ep")
async def test_create_ep_destroys_what_is_made_nevertheless(address: DeviceAddress) -> None:
    info = AddrInfo(destination=parse_address(address.host, 1))
    await cancel(lambda: SyncCmId.create_ep(info))


@both("resolve_addr", "resolve_route", "set_path")
@kinds
async def test_a_query_leaves_the_id_to_be_closed(address: DeviceAddress, kind: Kind) -> None:
    destination = parse_address(address.host, 1)
    async with await kind.create() as cm:
        await cancelled(lambda: cm.resolve_addr(destination))
        await close(cm)
    async with await kind.create() as cm:
        assert await cancelled(lambda: cm.resolve_addr(destination), begun=False)
        await cm.resolve_addr(destination)  # which had not begun
        assert await cancelled(lambda: cm.set_path(bytes(80)), begun=False)
        assert await cancelled(cm.resolve_route, begun=False)
        assert cm.state is CmState.ADDR_RESOLVED
        await cancelled(cm.resolve_route)
        await close(cm)


@both("connect", "accept")
@kinds
async def test_connecting_leaves_the_id_to_be_closed(address: DeviceAddress, kind: Kind) -> None:
    async with listening(address, kind) as listener, resolved(address, kind, listener) as client:
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            await server.create_qp(SMALL)
            await cancel(server.accept)
            await close(server)
        connecting.cancel()
        await loops.wait([connecting])
        await close(client)


@both("disconnect")
@kinds
async def test_a_disconnect_goes_on(address: DeviceAddress, kind: Kind) -> None:
    async with listening(address, kind) as listener, resolved(address, kind, listener) as client:
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            await server.create_qp(SMALL)
            server.cm_id.post_recv(1, await server.reg_msgs(bytearray(16)), 0, 16)
            await server.accept()
            await connecting
            await cancel(client.disconnect)
            assert (await server.get_recv_comp()).status is WcStatus.WR_FLUSH_ERR


@both("create_qp", "create_srq", "reg_msgs", "reg_read", "reg_write")
@kinds
async def test_what_is_made_is_the_ids(address: DeviceAddress, kind: Kind) -> None:
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
            await cancel(lambda step=step: step(cm))
        await close(cm)


@both("get_send_comp", "get_recv_comp")
@kinds
async def test_waiting_for_completions_loses_none(address: DeviceAddress, kind: Kind) -> None:
    async with listening(address, kind) as listener, resolved(address, kind, listener) as client:
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            await server.create_qp(SMALL)
            inbox = await server.reg_msgs(bytearray(16))
            server.cm_id.post_recv(1, inbox, 0, 16)
            await server.accept()
            await connecting
            await cancel(server.get_recv_comp)
            await cancel(client.get_send_comp)
            client.cm_id.post_send(2, await client.reg_msgs(bytearray(5)), 0, 5)
            assert (await client.get_send_comp()).check().wr_id == 2
            assert await cancelled(server.get_recv_comp, begun=False)
            assert (await server.get_recv_comp()).check().byte_len == 5


@both("get_request", "__anext__")
@kinds
async def test_waiting_for_requests_loses_none(address: DeviceAddress, kind: Kind) -> None:
    async with listening(address, kind) as listener, resolved(address, kind, listener) as client:
        await cancel(listener.get_request)
        await cancel(lambda: anext(listener))
        await client.create_qp(SMALL)
        connecting = loops.create_task(client.connect())
        await loops.sleep(0.1)
        await cancelled(listener.get_request, begun=False)
        async with await listener.get_request() as server:
            server.reject()
        await loops.wait([connecting])


@both("join_multicast", "leave_multicast")
@kinds
@pytest.mark.transport("IB")
async def test_groups_are_left_with_the_id(address: DeviceAddress, kind: Kind) -> None:
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
@kinds
async def test_a_migration_leaves_the_id_as_it_is(address: DeviceAddress, kind: Kind) -> None:
    async with listening(address, kind) as listener:
        migrate = listener.migrate
        arguments: tuple[None, ...] = (None,) if kind is AsyncCmId else ()
        await cancel(lambda: migrate(*arguments))  # type: ignore[arg-type, call-arg]
        assert listener.state is CmState.LISTENING
        moved = await migrate(*arguments)  # type: ignore[arg-type, call-arg]
        with pytest.raises(LocalClosed):
            await listener.get_request()
        await moved.aclose()


@both("aclose", "__aexit__")
@kinds
async def test_an_id_is_closed_all_the_same(address: DeviceAddress, kind: Kind) -> None:
    cm = await kind.create()
    await cancelled(cm.aclose)
    assert cm.state is CmState.CLOSED
    await cm.aclose()
