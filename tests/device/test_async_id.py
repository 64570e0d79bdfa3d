"""AsyncCmId, call by call: the steps that connect() and listen() take internally."""

from __future__ import annotations

import loops
import pytest
from cm_ids import CAPS, SMALL, OwnQueuePair, close, connect, exchange, listening, resolved

from aiordma import (
    AddressError,
    AsyncCmId,
    BusyError,
    CmEventType,
    LocalClosed,
    PortSpace,
    RdmaError,
    Rejected,
    RouteError,
    VerbsError,
)
from aiordma.cm import CmState
from aiordma.enums import AccessFlags, IdOption, QpState, SrqType
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, Ece, pack_path_data, parse_address
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    ProtectionDomain,
    QueuePairInit,
    Registration,
    SharedReceiveQueueCaps,
)


def state_of(cm: AsyncCmId) -> CmState:
    """Return the state. mypy does not assume that the next call returns the same."""
    return cm.state


@pytest.mark.parametrize("port_space", [PortSpace.TCP, PortSpace.IB])
async def test_connecting_step_by_step(address: DeviceAddress, port_space: PortSpace) -> None:
    async with await listening(address, AsyncCmId, port_space) as listener:
        client = await resolved(listener.local_address, AsyncCmId, port_space, init=None)
        client.context = "mine"
        await client.create_qp(SMALL)
        assert client.port_num == 1
        connecting = loops.create_task(client.connect())
        server = await anext(listener)
        await server.create_qp(SMALL)
        await server.accept()
        await connecting
        assert client.context == "mine"
        assert client.peer_address[1] == listener.local_address[1]
        assert server.peer_address[1] == client.local_address[1]
        await exchange(client, server)
        await loops.gather(client.disconnect(), server.disconnect())
        assert client.state is server.state is CmState.DISCONNECTED
        await client.disconnect()
        await close(client, server)


async def test_ids_use_the_users_protection_domain_and_queues(address: DeviceAddress) -> None:
    async with await listening(address, AsyncCmId) as listener:
        client = await resolved(listener.local_address, AsyncCmId, init=None)
        pd = ProtectionDomain(client.device())
        channel = CompletionChannel(client.device())
        cq = CompletionQueue(channel, 16)
        srq = await client.create_srq(SharedReceiveQueueCaps(max_wr=4), pd)
        qp = await client.create_qp(QueuePairInit(CAPS, cq, cq, srq), pd)
        assert qp.number == client.cm_id.qp_num
        server = await connect(client, listener)
        assert server.event is not None
        with pytest.raises(ValueError, match="of its own"):
            await client.get_send_comp()
        await close(client, server)
        for thing in (cq, channel, pd):
            thing.close()


@pytest.mark.transport("IB")
async def test_queue_pairs_that_the_user_modifies_are_connected(address: DeviceAddress) -> None:
    """The ids own no queue pairs. Each side creates one and modifies its state."""
    async with await listening(address, AsyncCmId) as listener:
        client = await resolved(listener.local_address, AsyncCmId, init=None)
        near = OwnQueuePair(client)
        near.modify(client, QpState.INIT)
        parameters = ConnectionParameters(
            b"", 1, 1, retry_count=7, rnr_retry_count=7, qp_num=near.qp.number
        )
        connecting = loops.create_task(client.connect(parameters))
        server = await listener.get_request()
        assert server.event is not None
        assert server.event.qp_num == near.qp.number
        far = OwnQueuePair(server)
        far.modify(server, QpState.INIT, QpState.RTR, QpState.RTS)
        accepting = loops.create_task(
            server.accept(ConnectionParameters(b"", 1, 1, rnr_retry_count=7, qp_num=far.qp.number))
        )
        await connecting
        assert state_of(client) is CmState.RESPONDED
        assert client.established is not None
        assert client.established.type is CmEventType.CONNECT_RESPONSE
        near.modify(client, QpState.RTR, QpState.RTS)
        client.establish()
        await accepting
        assert client.state is server.state is CmState.CONNECTED
        with pytest.raises(RdmaError):
            client.establish()
        near.destroy()
        far.destroy()
        await close(client, server)


@pytest.mark.transport("IB")
async def test_ece_options_are_offered_and_can_be_rejected(address: DeviceAddress) -> None:
    async with await listening(address, AsyncCmId) as listener:
        client = await resolved(listener.local_address, AsyncCmId, init=None)
        client.set_local_ece(Ece(vendor_id=0x1234, options=5))
        connecting = loops.create_task(client.connect(ConnectionParameters(qp_num=17)))
        server = await listener.get_request()
        offered = server.remote_ece()
        assert (offered.vendor_id, offered.options) == (0x1234, 5)
        server.reject(b"not these options", ece=True)
        with pytest.raises(Rejected) as rejected:
            await connecting
        assert rejected.value.status == 35
        assert rejected.value.private_data.startswith(b"not these options")
        await close(client, server)


async def test_options_take_effect(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as listener, await AsyncCmId.create() as other:
        listener.set_option(IdOption.REUSEADDR, 1)
        listener.set_option(IdOption.TOS, 8)
        listener.bind_addr(parse_address(address.host))
        listener.listen()
        other.set_option(IdOption.REUSEADDR, 1)
        other.set_option(IdOption.ACK_TIMEOUT, 14)
        with pytest.raises(VerbsError):
            other.bind_addr(parse_address(address.host, listener.local_address[1]))
        with pytest.raises(VerbsError):
            listener.set_option(IdOption.AFONLY, 1)


@pytest.mark.transport("IB")
async def test_set_path_replaces_resolve_route(address: DeviceAddress) -> None:
    async with await listening(address, AsyncCmId) as listener:
        first = await resolved(listener.local_address, AsyncCmId, init=None)
        route = first.route
        assert len(route.paths) == 1
        assert route.sgid == route.dgid == route.paths[0].dgid
        client = await AsyncCmId.create()
        await client.resolve_addr(parse_address(*listener.local_address))
        await client.set_path(pack_path_data(route.paths))
        assert client.state is CmState.ROUTE_RESOLVED
        await client.create_qp(SMALL)
        await close(first, client, await connect(client, listener))


async def test_set_path_with_invalid_data_fails(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as client:
        await client.resolve_addr(parse_address(address.host, 1))
        with pytest.raises(RouteError):
            await client.set_path(b"nonsense")
        assert client.state is CmState.ADDR_RESOLVED
        await client.resolve_route()


@pytest.mark.transport("IWARP")
async def test_join_multicast_on_iwarp_fails(address: DeviceAddress) -> None:
    async with await AsyncCmId.create(PortSpace.UDP) as cm:
        cm.bind_addr(parse_address(address.host))
        with pytest.raises(RdmaError):
            await cm.join_multicast(parse_address("239.7.7.1"))


async def test_a_shared_receive_queue_is_closed_before_its_id_and_xrc_is_refused(
    address: DeviceAddress,
) -> None:
    async with await resolved((address.host, 1), AsyncCmId, init=None) as cm:
        with pytest.raises(VerbsError) as refused:
            await cm.create_srq(SharedReceiveQueueCaps(max_wr=4), srq_type=SrqType.XRC)
        assert refused.value.function == "rdma_create_srq_ex"
        srq = await cm.create_srq(SharedReceiveQueueCaps(max_wr=4))
        if address.transport.name == "IB":  # siw does not support the query
            assert srq.query().max_wr >= 4
        srq.close()
        srq.close()


async def test_steps_out_of_order_are_refused(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as cm:
        with pytest.raises(RdmaError, match="not possible in state IDLE"):
            await cm.resolve_route()
        with pytest.raises(ValueError, match="not bound to a device"):
            await cm.create_qp(SMALL)
        with pytest.raises(ValueError, match="not bound to a device"):
            await cm.create_srq(SharedReceiveQueueCaps(max_wr=4))
        with pytest.raises(RdmaError, match="not possible in state IDLE"):
            await cm.accept()
    with pytest.raises(LocalClosed):
        await cm.create_qp(SMALL)


async def test_a_second_resolve_at_the_same_time_fails(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as cm:
        first = loops.create_task(cm.resolve_addr(parse_address(address.host, 1)))
        await loops.settle()
        with pytest.raises((BusyError, RdmaError)):
            await cm.resolve_addr(parse_address(address.host, 1))
        await first


async def test_resolve_addr_without_a_route_fails(address: DeviceAddress) -> None:
    async with await AsyncCmId.create() as cm:
        with pytest.raises(AddressError):
            await cm.resolve_addr(parse_address("240.0.0.1", 1), timeout=1)
        await cm.resolve_addr(parse_address(address.host, 1))


async def test_two_connections_receive_from_one_shared_receive_queue(
    address: DeviceAddress,
) -> None:
    async with await listening(address, AsyncCmId) as listener:
        # The owner of the shared receive queue
        owner = await resolved(listener.local_address, AsyncCmId, init=None)
        pd = ProtectionDomain(owner.device())
        srq = await owner.create_srq(SharedReceiveQueueCaps(max_wr=8), pd)
        memory = bytearray(64)
        inbox = await owner.reg_msgs(memory)
        assert inbox.length == 64
        pairs = []
        for _ in range(2):
            client = await resolved(listener.local_address, AsyncCmId)
            init = QueuePairInit(CAPS, srq=srq, sq_sig_all=True)
            pairs.append((client, await connect(client, listener, init, pd)))
        shared = Registration(pd, memory, AccessFlags.LOCAL_WRITE)
        for number in range(4):
            srq.post_recv(number, shared.address + 16 * number, 16, shared.lkey)
        for number, (client, server) in enumerate(pairs * 2):
            text = f"message {number}".encode()
            outbox = await client.reg_msgs(bytearray(text))
            client.cm_id.post_send(number, outbox, 0, len(text))
            (await client.get_send_comp()).check()
            received = (await server.get_recv_comp()).check()
            start = 16 * received.wr_id
            assert memory[start : start + received.byte_len] == text
        for pair in pairs:
            await close(*pair)
        await owner.aclose()
        shared.close()
        pd.close()
