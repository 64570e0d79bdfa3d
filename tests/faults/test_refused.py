"""Connections that cannot be established. Each fails with an error that names the reason."""

from __future__ import annotations

import errno
import ipaddress

import loops
import pytest
from helpers import TIME_LIMIT, cm_ids, pending_requests
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


@pytest.mark.parametrize(
    ("host", "error", "text"),
    [
        ("192.0.2.7", VerbsError, "does not have the address"),
        ("127.0.0.1", AddressError, "no loopback"),
        ("::1", AddressError, "no loopback"),
        ("localhost", AddressError, "no loopback"),
    ],
)
async def test_listen_on_an_address_of_no_device_fails(
    address: DeviceAddress, host: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await aiordma.listen(host, 0)


@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_out_of_range_raises_value_error(address: DeviceAddress, port: int) -> None:
    with pytest.raises(ValueError, match="not between 0 and 65535"):
        await aiordma.connect(address.host, port)
    with pytest.raises(ValueError, match="not between 0 and 65535"):
        await aiordma.listen(address.host, port)


async def test_listen_and_connect_on_a_port_in_use_fail(any_address: DeviceAddress) -> None:
    async with aiordma.listen(any_address.host, 0) as listener:
        where = listener.local_address
        for call in (aiordma.listen(*where), aiordma.connect(*where, local_address=where)):
            with pytest.raises(VerbsError, match="port is in use") as caught:
                await call
            assert caught.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    async with aiordma.listen(*listener.local_address):
        pass


async def test_listen_on_a_port_in_use_on_all_addresses_fails(address: DeviceAddress) -> None:
    async with aiordma.listen(None, 0) as listener:
        with pytest.raises(VerbsError, match="port is in use"):
            await aiordma.listen(address.host, listener.local_address[1])


async def test_closing_a_listener_rejects_pending_requests(address: DeviceAddress) -> None:
    count = 10
    listener = await aiordma.listen(address.host, 0)
    connecting = [loops.create_task(aiordma.connect(*listener.local_address)) for _ in range(count)]
    request = await listener.get_request()
    await loops.until(
        lambda: pending_requests(listener) == count - 1, "the other requests to arrive"
    )
    await listener.aclose()
    await request.reject()
    async with loops.timeout(TIME_LIMIT):
        results = await loops.gather(*connecting, return_exceptions=True)
    assert {type(result) for result in results} == {Rejected}


async def test_requests_beyond_the_backlog_are_rejected(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0, backlog=2) as listener:
        connecting = [loops.create_task(aiordma.connect(*listener.local_address)) for _ in range(6)]
        await loops.until(
            lambda: sum(task.done() for task in connecting) >= 4,
            "four peers to be rejected",
            seconds=TIME_LIMIT,  # siw repeats a TCP connect for two minutes
        )
        for _ in range(2):
            await (await listener.get_request()).reject()
        await loops.wait(connecting)
        # iWARP has the backlog of TCP, which drops the excess requests: such a peer can time out.
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


async def test_accept_of_a_cancelled_connect_fails_or_ends(address: DeviceAddress) -> None:
    """On iWARP the TCP connection still exists. It ends as soon as it is accepted."""
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        request = await listener.get_request()
        await cancel_connect(connecting, address)
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


async def test_reject_of_a_cancelled_connect_does_not_fail(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        request = await listener.get_request()
        await cancel_connect(connecting, address)
        await request.reject(b"too late")


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
