"""Requests that a program posts to an id itself: the functions rdma_post_* of rdma_verbs.h."""

from __future__ import annotations

import loops
import pytest
from cm_ids import connected, listening, resolved

from aiordma import PortSpace
from aiordma.cm import SyncCmId
from aiordma.enums import TransportType
from aiordma.rdmacm import DeviceAddress, parse_address
from aiordma.verbs import (
    AddressHandle,
    QueuePairCaps,
    QueuePairInit,
    Registration,
    SharedReceiveQueueCaps,
)

CAPS = QueuePairCaps(max_send_wr=4, max_recv_wr=4, max_send_sge=2, max_recv_sge=2)
INIT = QueuePairInit(CAPS, sq_sig_all=True)


async def halves(cm: SyncCmId, buffer: bytearray) -> list[tuple[Registration, int, int]]:
    """Register `buffer` for any access, and return its two halves as segments."""
    memory, middle = await cm.reg_write(buffer), len(buffer) // 2
    return [(memory, 0, middle), (memory, middle, len(buffer) - middle)]


async def test_sends_and_receives_of_several_pieces(any_address: DeviceAddress) -> None:
    async with connected(any_address, SyncCmId, INIT) as (client, server):
        inbox = bytearray(16)
        first, second = await halves(server, inbox)
        server.cm_id.post_recvv(1, [second, first])
        client.cm_id.post_sendv(2, await halves(client, bytearray(b"sixteen bytes ok")))
        assert (await client.get_send_comp()).check().wr_id == 2
        assert (await server.get_recv_comp()).check().byte_len == 16
        assert inbox == b"bytes oksixteen "
        assert client.cm_id.dst_port == server.cm_id.src_port == server.local_address[1]
        assert client.cm_id.port_space is PortSpace.TCP


async def test_reads_and_writes_of_the_peers_memory(any_address: DeviceAddress) -> None:
    async with connected(any_address, SyncCmId, INIT) as (client, server):
        source = await server.reg_read(bytearray(b"to be read"))
        written, read = bytearray(20), bytearray(10)
        target = await server.reg_write(written)
        first, second = await halves(client, read)
        client.cm_id.post_read(1, first, source.address, source.rkey)
        client.cm_id.post_readv(2, [second], source.address + 5, source.rkey)
        for number in (1, 2):
            assert (await client.get_send_comp()).check().wr_id == number
        assert read == b"to be read"
        client.cm_id.post_write(3, first, target.address, target.rkey)
        client.cm_id.post_writev(4, [second, first], target.address + 5, target.rkey)
        client.cm_id.post_read(5, first, source.address, source.rkey)  # after it, all has arrived
        for number in (3, 4, 5):
            assert (await client.get_send_comp()).check().wr_id == number
        assert written == b"to be readto be" + bytes(5)


@pytest.mark.transport("IB")
async def test_a_datagram_to_an_address_handle(any_address: DeviceAddress) -> None:
    async with (
        await listening(any_address, SyncCmId, PortSpace.UDP) as listener,
        await resolved(listener.local_address, SyncCmId, PortSpace.UDP, INIT) as client,
    ):
        connecting = loops.create_task(client.connect())
        async with await listener.get_request() as server:
            await server.create_qp(INIT)
            inbox = bytearray(60)
            server.cm_id.post_recv(1, await server.reg_msgs(inbox), 0, 60)
            await server.accept()
            await connecting
            event = client.established
            assert event is not None
            assert event.ah_attr is not None
            handle = AddressHandle(client.cm_id.pd(), event.ah_attr)
            hello = await client.reg_msgs(bytearray(b"hello"))
            client.cm_id.post_ud_send(2, (hello, 0, 5), handle, event.qp_num)
            (await client.get_send_comp()).check()
            assert (await server.get_recv_comp()).check().byte_len == 45  # with the GRH's 40 bytes
            assert inbox[40:45] == b"hello"
            handle.close()


async def test_what_an_id_without_a_queue_pair_refuses(address: DeviceAddress) -> None:
    async with await SyncCmId.create() as cm:
        assert cm.cm_id.channel_fd >= 0
        with pytest.raises(ValueError, match="not resolved"):
            cm.cm_id.resolve_route(1)
        with pytest.raises(ValueError, match="no protection domain"):
            cm.cm_id.pd()
        await cm.resolve_addr(parse_address(address.host, 1))
        memory = await cm.reg_msgs(bytearray(8))
        with pytest.raises(ValueError, match="no queue pair"):
            cm.cm_id.post_recv(1, memory, 0, 8)
        with pytest.raises(ValueError, match="without a queue pair"):
            cm.cm_id.accept()
        for get in (cm.cm_id.get_send_comp, cm.cm_id.get_recv_comp):
            with pytest.raises(ValueError, match="no completion queue"):
                get()
        srq = await cm.create_srq(SharedReceiveQueueCaps(max_wr=4))
        cm.cm_id.post_recv(1, memory, 0, 8)
        with pytest.raises(ValueError, match="are not within"):
            cm.cm_id.post_recv(2, memory, 1, 8)
        if address.transport is TransportType.IB:
            srq.arm(1)
            assert srq.query().limit == 1
