"""Establishing connections: addresses, names, private data, options, and many at once."""

from __future__ import annotations

import socket
from unittest import mock

import loops
import pytest
from helpers import connected, host_name, serving, unconfirmed_peer
from stream_sides import Script, settings

import aiordma
from aiordma import Connection, ConnectionOptions, ConnectRequest, PortSpace, Rejected
from aiordma.rdmacm import DeviceAddress


async def echo_one(listener: aiordma.Listener, private_data: bytes) -> ConnectRequest:
    """Accept one connection and echo its messages until it ends. Return the request."""
    request = await listener.get_request()
    async with request.accept(private_data) as connection:
        async for message in connection:
            await connection.send(message)
    return request


def unscoped(address: tuple[str, int]) -> tuple[str, int]:
    """Return the address without its scope, which rdma_cm does not report to a listener."""
    return address[0].partition("%")[0], address[1]


async def test_port_0_binds_a_free_port_and_both_ends_know_the_addresses(
    any_address: DeviceAddress,
) -> None:
    async with connected(any_address) as pair:
        host, port = pair.listener.local_address
        assert host == any_address.host
        assert port > 0
        assert pair.client.peer_address == (host, port)
        assert unscoped(pair.server.local_address) == unscoped((host, port))
        assert unscoped(pair.client.local_address) == unscoped(pair.server.peer_address)
        assert pair.client.local_address[0] == any_address.host


async def test_private_data_is_sent_both_ways(address: DeviceAddress) -> None:
    """The shortest is padded on RoCE. The other is as long as possible."""
    is_roce = address.transport.name == "IB"
    ask, answer = (56, 196) if is_roce else (251, 251)
    async with aiordma.listen(address.host, 0) as listener:
        for asked, answered in ((b"hello", b"welcome"), (b"q" * ask, b"a" * answer)):
            echoing = loops.create_task(echo_one(listener, answered))
            async with aiordma.connect(*listener.local_address, private_data=asked) as connection:
                padded = answered.ljust(answer, b"\0") if is_roce else answered
                assert connection.private_data == padded
            padded = asked.ljust(ask, b"\0") if is_roce else asked
            assert (await echoing).private_data == padded


@pytest.mark.transport("IB")  # on iWARP the reply establishes the connection
async def test_accept_returns_the_next_peer_beside_one_that_does_not_confirm(
    address: DeviceAddress,
) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept())
        async with (
            await unconfirmed_peer(*listener.local_address),
            aiordma.connect(*listener.local_address) as client,
            await accepting as server,
        ):
            assert server.peer_address == client.local_address
            assert listener.stats.handshakes == 1


@pytest.mark.transport("IB")
async def test_streams_are_accepted_beside_a_peer_that_does_not_confirm(
    address: DeviceAddress,
) -> None:
    async with aiordma.listen_stream(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept())
        request = Script(settings()).peer.pack()
        async with (
            await unconfirmed_peer(*listener.local_address, request),
            aiordma.connect_stream(*listener.local_address) as client,
            await accepting as server,
        ):
            assert server.peer_address == client.local_address
            assert listener.stats.handshakes == 1


async def test_a_request_can_be_answered_only_once_and_not_with_too_much_private_data(
    address: DeviceAddress,
) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        with pytest.raises(ValueError, match="private data of 300 bytes"):
            await aiordma.connect(*listener.local_address, private_data=bytes(300))
        connecting = loops.create_task(aiordma.connect(*listener.local_address))
        request = await listener.get_request()
        for answer in (request.accept, request.reject):
            with pytest.raises(ValueError, match="private data of 300 bytes"):
                await answer(bytes(300))
        async with request.accept() as connection:
            for answer in (request.accept, request.reject):
                with pytest.raises(aiordma.LocalClosed, match="answered already"):
                    await answer()
            await (await connecting).aclose()
            assert [message async for message in connection] == []


async def test_connect_from_a_local_address(any_address: DeviceAddress) -> None:
    async with aiordma.listen(any_address.host, 0) as listener:
        echoing = loops.create_task(echo_one(listener, b""))
        async with aiordma.connect(
            *listener.local_address, local_address=(any_address.host, 0)
        ) as connection:
            assert connection.local_address[0] == any_address.host
        await echoing


async def test_connect_and_listen_by_name(address: DeviceAddress) -> None:
    with host_name(address) as name:
        async with aiordma.listen(name, 0) as listener:
            echoing = loops.create_task(echo_one(listener, b""))
            async with aiordma.connect(name, listener.local_address[1]) as connection:
                assert connection.peer_address[0] == address.host
            await echoing


async def test_every_address_of_a_name_is_tried(address: DeviceAddress) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
            (family, socket.SOCK_STREAM, 6, "", (address.host, 0)),
        ]

    async with aiordma.listen(address.host, 0) as listener:
        echoing = loops.create_task(echo_one(listener, b""))
        with mock.patch.object(socket, "getaddrinfo", resolve):
            async with aiordma.connect("two.example", listener.local_address[1]) as connection:
                assert connection.peer_address[0] == address.host
        await echoing


async def test_listen_without_a_host_listens_on_all_addresses(any_address: DeviceAddress) -> None:
    async with aiordma.listen(None, 0) as listener:
        echoing = loops.create_task(echo_one(listener, b""))
        port = listener.local_address[1]
        async with aiordma.connect(any_address.host, port) as connection:
            await connection.send(b"hello")
            assert await connection.recv() == b"hello"
        asked = (await echoing).local_address
        assert unscoped(asked) == unscoped((any_address.host, port))


async def test_many_connections_at_once_keep_their_messages_apart(address: DeviceAddress) -> None:
    options = ConnectionOptions(send_depth=4, recv_depth=4, max_message_size=256)

    async def exchange(number: int, where: tuple[str, int]) -> None:
        async with aiordma.connect(*where, options=options) as connection:
            for round_number in range(3):
                message = b"%d/%d" % (number, round_number)
                await connection.send(message)
                assert await connection.recv() == message

    async with serving(address, options=options) as listener, loops.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(exchange(number, listener.local_address))


@pytest.mark.transport("IB")
@pytest.mark.parametrize(
    "options",
    [
        ConnectionOptions(tos=32, ack_timeout=14, reuse_address=True),
        ConnectionOptions(port_space=PortSpace.IB),
        ConnectionOptions(max_inline=0, send_depth=1, recv_depth=1),
        ConnectionOptions(responder_resources=0, initiator_depth=0, rnr_retry_count=6),
        ConnectionOptions(responder_resources=255, initiator_depth=255),
    ],
    ids=["id-options", "port-space", "smallest", "no-reads", "device-limits"],
)
async def test_connections_with_unusual_options_carry_messages(
    address: DeviceAddress, options: ConnectionOptions
) -> None:
    async with connected(address, options, options) as pair:
        for size in (0, 1, 65, 1000):
            await pair.client.send(bytes(size))
            assert await pair.server.recv() == bytes(size)


async def test_options_beyond_the_devices_limits_are_refused(address: DeviceAddress) -> None:
    many, small = 1 << 20, 1
    async with aiordma.listen(address.host, 0) as listener:
        too_deep = ConnectionOptions(send_depth=many, recv_depth=many, max_message_size=small)
        with pytest.raises(ValueError, match="allows a send_depth and recv_depth of"):
            await aiordma.connect(*listener.local_address, options=too_deep)
        too_much_inline = ConnectionOptions(max_inline=1 << 16)
        with pytest.raises(aiordma.VerbsError, match="try a smaller max_inline"):
            await aiordma.connect(*listener.local_address, options=too_much_inline)


async def test_a_handler_that_raises_ends_its_own_connection_only(
    address: DeviceAddress, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(connection: Connection) -> None:
        message = await connection.recv()
        if message == b"bad":
            raise RuntimeError("as asked")
        await connection.send(message)

    async with serving(address, handler) as listener:
        async with aiordma.connect(*listener.local_address) as connection:
            await connection.send(b"bad")
            assert [message async for message in connection] == []
        async with aiordma.connect(*listener.local_address) as connection:
            await connection.send(b"good")
            assert await connection.recv() == b"good"
    assert "as asked" in caplog.text


async def test_reject_sends_private_data(address: DeviceAddress) -> None:
    is_roce = address.transport.name == "IB"
    longest = 148 if is_roce else 251
    async with aiordma.listen(address.host, 0) as listener:
        for reason in (b"not today", b"n" * longest):
            connecting = loops.create_task(aiordma.connect(*listener.local_address))
            await (await listener.get_request()).reject(reason)
            with pytest.raises(Rejected) as caught:
                await connecting
            padded = reason.ljust(longest, b"\0") if is_roce else reason
            assert caught.value.private_data == padded
            assert caught.value.status == 28 if is_roce else caught.value.status < 0


async def test_connections_between_loops_of_two_threads(address: DeviceAddress) -> None:
    found: list[tuple[str, int]] = []

    async def serve() -> None:
        async with aiordma.listen(address.host, 0) as listener:
            found.append(listener.local_address)
            await echo_one(listener, b"from the other loop")

    serving = loops.create_task(loops.to_thread(loops.runner_of_this_kind(), serve))
    await loops.until(lambda: found, "the loop of the other thread to listen")
    async with aiordma.connect(*found[0]) as connection:
        for number in range(20):
            await connection.send(b"%d" % number)
            assert await connection.recv() == b"%d" % number
    await serving


async def test_connections_on_several_loops_one_after_the_other(address: DeviceAddress) -> None:
    async def once() -> None:
        async with connected(address) as pair:
            await pair.client.send(b"x")
            assert await pair.server.recv() == b"x"

    for _ in range(8):
        await loops.to_thread(loops.runner_of_this_kind(), once)


async def test_objects_open_on_a_closed_loop_warn(address: DeviceAddress) -> None:
    async def leave_open() -> None:
        listener = await aiordma.listen(address.host, 0)
        accepting = loops.create_task(listener.accept())
        objects.extend((listener, await aiordma.connect(*listener.local_address), await accepting))

    objects: list[object] = []
    await loops.to_thread(loops.runner_of_this_kind(), leave_open)
    with pytest.warns(ResourceWarning, match="unclosed"):
        objects.clear()
