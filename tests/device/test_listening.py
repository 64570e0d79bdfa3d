"""Listening ids of both kinds. Each has an event channel, which does not leak."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import loops
import pytest
from cm_ids import SMALL, CmId, Kind, both_kinds, close, listening, resolved
from helpers import ResourceSnapshot, has_pending_event, has_waiter

from aiordma import AsyncCmId, RdmaError, Rejected, SyncCmId, VerbsError
from aiordma.cm import CmState
from aiordma.enums import IdOption, PortSpace, TransportType
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, parse_address


async def bound(address: DeviceAddress, kind: Kind, port: int = 0) -> CmId:
    """Return an id that is bound to a port, to which others can be bound, too."""
    cm = await kind.create()
    cm.set_option(IdOption.REUSEADDR, 1)
    cm.bind_addr(parse_address(address.host, port))
    return cm


async def connecting_to(
    listener: CmId, client: CmId | None = None
) -> tuple[CmId, loops.Task[None]]:
    client = client or await AsyncCmId.create()
    await client.resolve_addr(parse_address(*listener.local_address))
    await client.resolve_route()
    await client.create_qp(SMALL)
    return client, loops.create_task(client.connect())


async def migrated(cm: CmId) -> CmId:
    return await (cm.migrate() if isinstance(cm, SyncCmId) else cm.migrate(None))


def open_channels() -> int:
    """Return the number of event channels that this process has open."""
    return ResourceSnapshot.take().files["/dev/infiniband/rdma_cm"]


@contextmanager
def all_descriptors_in_use() -> Iterator[None]:
    """Allow this process to open no more file descriptors during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.real("the descriptors of the process are counted")
async def test_a_listener_uses_one_descriptor(address: DeviceAddress) -> None:
    async with await AsyncCmId.create():  # the loop's channel is open
        before = open_channels()
        async_id = await listening(address, AsyncCmId)
        sync_id = await listening(address, SyncCmId)
        assert open_channels() == before + 2
        moved = await migrated(async_id), await migrated(sync_id)
        assert open_channels() == before + 2
        await close(*moved)
        assert open_channels() == before


@both_kinds
async def test_an_id_whose_listen_failed_can_still_be_used(
    address: DeviceAddress, kind: Kind
) -> None:
    """Another id listens on its port, so it cannot listen: as an id of either kind."""
    elsewhere, cm = await listening(address, kind), await bound(address, kind)
    other = await bound(address, kind, cm.local_address[1])
    for _ in range(3):
        with pytest.raises(VerbsError, match="port is in use"):
            cm.listen()
        assert cm.state is CmState.ADDR_BOUND
        cm = await migrated(cm)
    with pytest.raises(VerbsError, match="port is in use"):
        other.listen()
    await check_request(elsewhere, cm)
    await cm.aclose()
    other.listen()
    await check_request(other)
    await close(elsewhere, other)


async def check_request(listener: CmId, client: CmId | None = None) -> None:
    client, connecting = await connecting_to(listener, client)
    async with client, await listener.get_request() as request:
        request.reject(b"heard")
        with pytest.raises(Rejected):
            await connecting


@both_kinds
async def test_closing_a_listener_rejects_only_pending_requests(
    address: DeviceAddress, kind: Kind
) -> None:
    listener = await migrated(await migrated(await listening(address, kind)))
    client, connecting = await connecting_to(listener)
    server = await listener.get_request()
    late, too_late = await connecting_to(listener)
    await loops.until(lambda: has_pending_event(listener), "the second request to arrive")
    await listener.aclose()
    with pytest.raises(Rejected):
        await too_late
    await server.create_qp(SMALL)
    await server.accept()
    await connecting
    await loops.gather(client.disconnect(), server.disconnect())
    await close(client, late, server)


async def test_listen_without_a_free_descriptor_fails(address: DeviceAddress) -> None:
    async with await bound(address, AsyncCmId) as cm:
        with all_descriptors_in_use(), pytest.raises(VerbsError) as caught:
            cm.listen()
        assert caught.value.errno == errno.EMFILE
        assert cm.state is CmState.ADDR_BOUND
        cm.listen()
        with all_descriptors_in_use():
            cm = await migrated(await migrated(cm))
        await check_request(cm)
        await cm.aclose()


async def test_a_request_without_a_free_descriptor_is_rejected(address: DeviceAddress) -> None:
    async with await listening(address, SyncCmId) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.until(lambda: has_waiter(listener), "a thread to wait for a request")
        client = await resolved(listener.local_address, AsyncCmId)
        with all_descriptors_in_use():
            connecting = loops.create_task(client.connect())
            with pytest.raises(VerbsError) as caught:
                await waiting
            assert caught.value.errno == errno.EMFILE
            with pytest.raises(Rejected):
                await connecting
        await client.aclose()
        await check_request(listener)


@both_kinds
async def test_a_listener_dropped_by_another_thread_rejects_its_requests(
    address: DeviceAddress, kind: Kind
) -> None:
    """The loop stops watching the listener's channel before the channel is closed.

    iWARP's connection manager (iwcm.c) never answers a request that arrives while its listener is
    destroyed: IWCM_F_DROP_EVENTS. There, the only request has arrived before.
    """
    count = 1 if address.transport is TransportType.IWARP else 3
    for _ in range(5):
        box = [await listening(address, kind)]
        clients = [await connecting_to(box[0]) for _ in range(count)]
        await loops.until(partial(has_pending_event, box[0]), "a request to arrive")

        def drop(box: list[CmId] = box) -> None:
            box.clear()
            gc.collect()

        with pytest.warns(ResourceWarning, match="unclosed"):
            await loops.to_thread(drop)
        for client, connecting in clients:
            with pytest.raises(Rejected):
                await connecting
            await client.aclose()


@pytest.mark.transport("IB")
@both_kinds
async def test_a_datagram_listener_migrates_without_losing_requests(
    address: DeviceAddress, kind: Kind
) -> None:
    listener = await listening(address, kind, PortSpace.UDP)
    for number in range(4):
        client = await resolved(listener.local_address, kind, PortSpace.UDP, init=None)
        connecting = loops.create_task(client.connect(ConnectionParameters(qp_num=17)))
        if number % 2:
            await loops.until(partial(has_pending_event, listener), "the request to arrive")
        listener = await migrated(listener)
        async with await listener.get_request() as request:
            await request.accept(ConnectionParameters(qp_num=40 + number))
            await connecting
        assert client.established is not None
        assert client.established.qp_num == 40 + number
        await client.aclose()
    await listener.aclose()


@pytest.mark.transport("IB")
@both_kinds
async def test_datagram_ids_exchange_their_queue_pair_numbers(
    address: DeviceAddress, kind: Kind
) -> None:
    """rdma-core 44 does not acknowledge the event of a datagram request that a synchronous id
    accepts. Destroying its listener would wait for ever.
    """
    listener = await listening(address, kind, PortSpace.UDP)
    client = await resolved(listener.local_address, kind, PortSpace.UDP)
    connecting = loops.create_task(client.connect(ConnectionParameters(b"who are you?")))
    server = await listener.get_request()
    assert server.event is not None
    assert server.event.private_data.startswith(b"who are you?")
    far = await server.create_qp(SMALL)
    await server.accept(ConnectionParameters(b"I am"))
    await connecting
    assert server.state is CmState.CONNECTED
    assert client.established is not None
    assert client.established.qp_num == far.number != client.cm_id.qp_num
    assert client.established.qkey == 0x01234567
    assert client.established.ah_attr is not None
    with pytest.raises(RdmaError, match="no connection to end"):
        await client.disconnect()
    await close(listener, server, client)
