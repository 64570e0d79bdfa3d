"""Messages, datagrams and multicast with the C programs of rdma-core, in both roles."""

from __future__ import annotations

import asyncio

import pytest
from programs import connect_when_it_listens, free_port, running_peer, until_accepted

import aiordma
from aiordma import Connection, ConnectionOptions, DatagramEndpoint
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.loops("asyncio"), pytest.mark.may_block]
on_roce = pytest.mark.transport("IB")


async def check_ended(connection: Connection) -> None:
    """Check that the peer disconnects without another message."""
    assert [message async for message in connection] == []


# --- rdma_client and rdma_server: one message of 16 bytes in each direction ---

# The programs request no RDMA reads, and post one receive buffer of 16 bytes.
SIXTEEN = ConnectionOptions(max_message_size=16, responder_resources=0, initiator_depth=0)


async def test_aiordma_connects_to_rdma_server(any_address: DeviceAddress) -> None:
    host, port = any_address.host, await free_port(any_address)
    async with (
        running_peer("rdma_server", "-s", host, "-p", port, prints="end 0"),
        await connect_when_it_listens(host, port, SIXTEEN) as connection,
    ):
        await connection.send(b"sixteen bytes ok")
        assert await connection.recv() == bytes(16)
        await check_ended(connection)


async def test_rdma_client_connects_to_aiordma(any_address: DeviceAddress) -> None:
    async with (
        aiordma.listen(any_address.host, 0, options=SIXTEEN) as listener,
        running_peer(
            *("rdma_client", "-s", any_address.host, "-p", listener.local_address[1]),
            prints="end 0",
        ),
        await listener.accept() as connection,
    ):
        assert await connection.recv() == bytes(16)
        await connection.send(b"sixteen bytes ok")
        await check_ended(connection)


# --- ucmatose: first the server sends ten messages of 100 bytes, then the client ---

COUNT, SIZE = 10, 100
# On iWARP the accepting side cannot send first.
HUNDRED = ConnectionOptions(max_message_size=SIZE, responder_resources=1, initiator_depth=1)
SUCCESS = "return status 0"


@on_roce
@pytest.mark.parametrize("migrate", [[], ["-m"]], ids=["stays", "migrates"])
async def test_aiordma_connects_to_ucmatose(any_address: DeviceAddress, migrate: list[str]) -> None:
    host, port = any_address.host, await free_port(any_address)
    async with (
        running_peer("ucmatose", "-b", host, "-p", port, *migrate, prints=SUCCESS),
        await connect_when_it_listens(host, port, HUNDRED) as connection,
    ):
        for _ in range(COUNT):
            assert len(await connection.recv()) == SIZE
        for _ in range(COUNT):
            await connection.send(bytes(SIZE))
        await check_ended(connection)


@on_roce
@pytest.mark.parametrize("port_space", ["tcp", "ib"])
async def test_ucmatose_connects_to_aiordma(any_address: DeviceAddress, port_space: str) -> None:
    space = aiordma.PortSpace[port_space.upper()]
    options = ConnectionOptions(max_message_size=SIZE, port_space=space)
    async with (
        aiordma.listen(any_address.host, 0, options=options) as listener,
        running_peer(
            *("ucmatose", "-s", any_address.host, "-p", listener.local_address[1]),
            *("-P", port_space),
            prints=SUCCESS,
        ),
        await listener.accept() as connection,
    ):
        for number in range(COUNT):
            await connection.send(bytes([number]) * SIZE)
        for _ in range(COUNT):
            assert len(await connection.recv()) == SIZE


# --- udaddy: ten datagrams in each direction, with the queue pair number as immediate data ---

UDADDY_PORT = 7174


async def receive_all(endpoint: DatagramEndpoint) -> list[aiordma.Datagram]:
    """Receive COUNT datagrams of one peer, and check each. None is sent again."""
    datagrams = [await endpoint.recv_from() for _ in range(COUNT)]
    for datagram in datagrams:
        assert len(datagram.data) == SIZE
        assert datagram.imm == datagram.peer.qp_num
        assert datagram.peer == datagrams[0].peer
    return datagrams


@on_roce
async def test_aiordma_sends_to_udaddy(any_address: DeviceAddress) -> None:
    host = any_address.host
    async with (
        running_peer("udaddy", "-b", host, prints=SUCCESS),
        aiordma.open_datagram((host, 0)) as endpoint,
    ):
        peer = await until_accepted(lambda: endpoint.resolve(host, UDADDY_PORT), UDADDY_PORT)
        for _ in range(COUNT):
            await endpoint.send_to(peer, bytes(SIZE), imm=endpoint.qp_num)
        answers = await receive_all(endpoint)
        assert answers[0].peer == peer


@on_roce
async def test_udaddy_sends_to_aiordma(any_address: DeviceAddress) -> None:
    host = any_address.host
    async with aiordma.open_datagram((host, UDADDY_PORT)) as endpoint:
        serving = asyncio.create_task(endpoint.serve())
        async with running_peer("udaddy", "-s", host, "-b", host, prints=SUCCESS):
            for datagram in await receive_all(endpoint):
                await endpoint.send_to(datagram.peer, datagram.data, imm=endpoint.qp_num)
    await serving


# --- mckey: multicast. The sender leaves the group at once, the receiver waits for ten ---

GROUP = "239.60.61.62"
MCKEY = ("mckey", "-m", GROUP, "-C", COUNT, "-S", SIZE)


@on_roce
@pytest.mark.parametrize("send_only", [False, True], ids=["member", "send-only"])
async def test_aiordma_sends_to_mckey(address: DeviceAddress, send_only: bool) -> None:
    async with (
        running_peer(*MCKEY, "-b", address.host, prints="test complete") as receiver,
        aiordma.open_datagram((address.host, 0)) as endpoint,
        await endpoint.join(GROUP, send_only=send_only) as group,
    ):
        while receiver.returncode is None:  # mckey prints nothing when it is ready
            await endpoint.send_to(group, bytes(SIZE), imm=endpoint.qp_num)
            await asyncio.sleep(0.02)  # paces the datagrams


@on_roce
@pytest.mark.parametrize("mode", [(), ("-o",)], ids=["member", "send-only"])
async def test_mckey_sends_to_aiordma(address: DeviceAddress, mode: tuple[str, ...]) -> None:
    """mckey is started again until a datagram arrives: some kernels lose them when it leaves."""
    async with (
        aiordma.open_datagram((address.host, 0)) as endpoint,
        await endpoint.join(GROUP),
    ):
        receiving = asyncio.create_task(endpoint.recv_from())
        while not receiving.done():
            async with running_peer(*MCKEY, "-s", "-b", address.host, *mode):
                pass
        datagram = await receiving
        assert (len(datagram.data), datagram.group) == (SIZE, GROUP)
        assert datagram.imm == datagram.peer.qp_num
        assert datagram.peer.host == address.host
