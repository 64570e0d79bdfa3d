"""Connections that cannot be established. Each fails with an error that names the reason."""

from __future__ import annotations

import errno
import ipaddress

import loops
import pytest
from helpers import TIME_LIMIT, cm_ids, kernel_parameter, pending_requests
from programs import free_port

import aiordma
from aiordma import AddressError, ConnectError, ConnectionOptions, Rejected, Unreachable, VerbsError
from aiordma.rdmacm import DeviceAddress

# For an address that no host has: the time after which the kernel stops asking for it.
QUICK = ConnectionOptions(resolve_timeout=1.0)


async def test_connect_without_a_listener_is_rejected(any_address: DeviceAddress) -> None:
    port = await free_port(any_address)
    with pytest.raises(Rejected) as caught:
        await aiordma.connect(any_address.host, port)
    assert caught.value.status == (8 if any_address.transport.name == "IB" else -111)
    assert str(port) in str(caught.value)


async def test_connect_to_an_unused_address_fails(address: DeviceAddress) -> None:
    """The address is in the device's network, so the kernel asks for the neighbour in vain."""
    network = ipaddress.ip_network(f"{address.host}/24", strict=False)
    unused = str(network.broadcast_address - 1)
    async with loops.timeout(TIME_LIMIT):
        with pytest.raises((AddressError, Unreachable), match=unused):
            await aiordma.connect(unused, 7471, options=QUICK)


@pytest.mark.parametrize(
    ("host", "error", "text"),
    [
        ("127.0.0.1", ConnectError, "aiordma devices"),
        ("::1", ConnectError, "aiordma devices"),
        ("192.0.2.7", ConnectError, r"192\.0\.2\.7"),
        ("no-such-host.invalid", AddressError, r"no-such-host\.invalid"),
    ],
)
async def test_connect_to_a_host_without_a_route_fails(
    address: DeviceAddress, host: str, error: type[ConnectError], text: str
) -> None:
    with pytest.raises(error, match=text):
        await aiordma.connect(host, await free_port(address))


async def test_listen_on_an_address_of_no_device_fails(address: DeviceAddress) -> None:
    with pytest.raises(VerbsError, match="does not have the address"):
        await aiordma.listen("192.0.2.7", 0)


async def test_listen_and_connect_on_a_port_in_use_fail(any_address: DeviceAddress) -> None:
    async with aiordma.listen(any_address.host, 0) as listener:
        where = listener.local_address
        for call in (aiordma.listen(*where), aiordma.connect(*where, local_address=where)):
            with pytest.raises(VerbsError, match="port is in use") as caught:
                await call
            assert caught.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    async with aiordma.listen(*where):
        pass
    async with aiordma.listen(None, 0) as listener:
        with pytest.raises(VerbsError, match="port is in use"):
            await aiordma.listen(any_address.host, listener.local_address[1])


async def test_requests_beyond_the_backlog_are_rejected(address: DeviceAddress) -> None:
    """iWARP has the backlog of TCP, which drops them. The peer repeats them, here for 7 seconds."""
    with kernel_parameter("net/ipv4/tcp_syn_retries", "2"):
        async with aiordma.listen(address.host, 0, backlog=2) as listener:
            where = listener.local_address
            connecting = [loops.create_task(aiordma.connect(*where)) for _ in range(6)]
            await loops.until(
                lambda: sum(task.done() for task in connecting) >= 4, "four peers to be rejected"
            )
            for _ in range(2):
                await (await listener.get_request()).reject()
            await loops.wait(connecting)
            late = {Unreachable} if address.transport.name == "IWARP" else set()
            assert {type(task.exception()) for task in connecting} - late == {Rejected}


async def cancel_connect(
    connecting: loops.Task[aiordma.Connection], address: DeviceAddress
) -> None:
    """Cancel a task that connects. Return when the kernel has begun to destroy its id."""
    before = cm_ids(address.device)
    connecting.cancel()
    await loops.wait([connecting])
    assert connecting.cancelled()
    await loops.until(lambda: cm_ids(address.device) == before - 1, "the id to be destroyed")


@pytest.mark.parametrize("answer", ["reject", "accept"])
async def test_answer_to_a_cancelled_connect(address: DeviceAddress, answer: str) -> None:
    """reject() does not fail. On iWARP the TCP connection still exists, and ends when accepted."""
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        request = await listener.get_request()
        await cancel_connect(connecting, address)
        if answer == "reject":
            await request.reject(b"too late")
            return
        try:
            connection = await request.accept()
        except ConnectError:
            return
        assert address.transport.name == "IWARP"
        async with connection, loops.timeout(TIME_LIMIT):
            assert [message async for message in connection] == []


@pytest.mark.transport("IB")
async def test_accept_skips_a_cancelled_connect(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        cancelled = loops.create_task(aiordma.connect(*listener.local_address))
        await loops.until(lambda: pending_requests(listener), "the request to arrive")
        await cancel_connect(cancelled, address)
        waiting = loops.create_task(aiordma.connect(*listener.local_address))
        async with (
            loops.timeout(TIME_LIMIT),
            await listener.accept() as server,
            await waiting as client,
        ):
            await client.send(b"here")
            assert await server.recv() == b"here"


@pytest.mark.transport("IB")
async def test_a_message_larger_than_the_peers_buffers_ends_the_connection(
    address: DeviceAddress,
) -> None:
    small = ConnectionOptions(max_message_size=100)
    async with aiordma.listen(address.host, 0, options=small) as listener:
        accepting = loops.create_task(listener.accept())
        async with aiordma.connect(*listener.local_address) as client, await accepting as server:
            await client.send(bytes(101))
            with pytest.raises(aiordma.WorkRequestError) as caught:
                await server.recv()
            # The specification requires LOC_LEN_ERR. Soft-RoCE reports LOC_QP_OP_ERR.
            assert caught.value.status.name in ("LOC_LEN_ERR", "LOC_QP_OP_ERR")
            with pytest.raises(aiordma.RdmaError):
                await client.recv()
