"""Connections that end without a fault: close, abort and cancelled close."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import loops
import pytest
from helpers import DEFAULT, TIME_LIMIT, connected, is_receiving
from streaming import streaming

from aiordma import Connection, ConnectionOptions, LocalClosed, PeerClosed
from aiordma.memory import buffer_pool
from aiordma.rdmacm import DeviceAddress


@pytest.mark.parametrize("receivers", [DEFAULT, ConnectionOptions(shared_recv_depth=32)])
async def test_messages_sent_before_aclose_arrive_and_then_iteration_ends(
    address: DeviceAddress, receivers: ConnectionOptions
) -> None:
    sent = [b"%d" % number * 500 for number in range(30)]
    async with connected(address, server=receivers) as pair:
        for message in sent:
            await pair.client.send(message)
        await pair.client.aclose()
        assert [message async for message in pair.server] == sent
        with pytest.raises(PeerClosed):
            await pair.server.recv()
        with pytest.raises(PeerClosed):
            await pair.server.send(b"too late")
        assert pair.server.closed


async def abort(connection: Connection) -> None:
    connection.abort()
    assert connection.closed


@pytest.mark.parametrize("close", [Connection.aclose, abort])
@pytest.mark.parametrize("by_peer", [True, False])
async def test_the_end_of_a_connection_ends_a_waiting_recv(
    address: DeviceAddress, close: Callable[[Connection], Awaitable[None]], by_peer: bool
) -> None:
    async with connected(address) as pair:
        receiving = loops.create_task(pair.server.recv())
        await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
        await close(pair.client if by_peer else pair.server)
        with pytest.raises(PeerClosed if by_peer else LocalClosed):
            await receiving


async def test_both_ends_can_close_at_the_same_time(address: DeviceAddress) -> None:
    for _ in range(10):
        async with connected(address) as pair:
            await pair.client.send(b"x")
            await loops.gather(pair.client.aclose(), pair.server.aclose())


@pytest.mark.transport("IB")
async def test_aclose_is_bounded_when_the_peer_does_not_receive(address: DeviceAddress) -> None:
    # The peer never receives. On RoCE its full receive queue delays the sends for ever.
    client = ConnectionOptions(close_timeout=0.5)
    server = ConnectionOptions(recv_depth=1)
    async with connected(address, client, server) as pair:
        for _ in range(10):
            await pair.client.send(b"x")
        begin = loops.now()
        await pair.client.aclose()
        assert 0.4 < loops.now() - begin < TIME_LIMIT  # time is the subject: close_timeout


@pytest.mark.transport("IB")
async def test_local_close_ends_a_waiting_send(address: DeviceAddress) -> None:
    client = ConnectionOptions(send_depth=1, close_timeout=0.1)
    async with connected(address, client, ConnectionOptions(recv_depth=1)) as pair:
        sends = [loops.create_task(pair.client.send(b"x")) for _ in range(5)]
        await loops.until(lambda: sum(send.done() for send in sends) == 2, "two sends to return")
        assert pair.client.stats.send_waits > 0
        assert not all(send.done() for send in sends)
        await pair.client.aclose()
        results = await loops.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), LocalClosed}


async def test_a_cancelled_aclose_still_destroys_everything(address: DeviceAddress) -> None:
    for steps in range(1, 12):
        async with connected(address) as pair:
            closing = loops.create_task(pair.client.aclose())
            for _ in range(steps):
                await loops.sleep(0)
            closing.cancel()
            await loops.wait([closing])
            with pytest.raises(LocalClosed):
                await pair.client.send(b"x")


async def test_a_block_that_raises_closes_gracefully(address: DeviceAddress) -> None:
    async def fail(connection: Connection) -> None:
        async with connection:
            await connection.send(b"before the mistake")
            raise ZeroDivisionError

    async with connected(address) as pair:
        with pytest.raises(ZeroDivisionError):
            await fail(pair.client)
        assert [message async for message in pair.server] == [b"before the mistake"]


async def test_closing_a_listener_ends_its_waits_but_not_its_connections(
    address: DeviceAddress,
) -> None:
    async with connected(address) as pair:
        waiting = await loops.start(pair.listener.get_request())
        await pair.listener.aclose()
        with pytest.raises(LocalClosed):
            await waiting
        await pair.client.send(b"still here")
        assert await pair.server.recv() == b"still here"
        with pytest.raises(LocalClosed):
            await pair.listener.get_request()
        assert [request async for request in pair.listener] == []


@pytest.mark.parametrize("is_held", [False, True])
async def test_receive_buffers_are_freed_when_a_connection_is_closed(
    address: DeviceAddress, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not kept until the garbage collector frees the connection, unless it is needed."""
    monkeypatch.setattr(buffer_pool, "KEPT_BYTES", 0)
    async with connected(address) as pair:
        memory = pair.server._endpoint.data_path._ring._region.view
        await pair.client.send(b"read me")
        message = await pair.server.recv_message()
        if not is_held:
            message.release()
        await pair.server.aclose()
        assert any(memory) == is_held
        if is_held:
            assert bytes(message) == b"read me"
            message.release()


async def test_messages_of_a_connection_that_the_peer_closed_stay(
    address: DeviceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_pool, "KEPT_BYTES", 0)
    async with connected(address) as pair:
        memory = pair.server._endpoint.data_path._ring._region.view
        await pair.client.send(b"read me")
        await pair.client.aclose()
        await loops.until(lambda: pair.server.closed, "the connection to end")
        assert any(memory)
        assert await pair.server.recv() == b"read me"
        await pair.server.aclose()
        assert not any(memory)


async def test_buffers_of_a_stream_are_freed_when_it_is_closed(address: DeviceAddress) -> None:
    async with streaming(address) as pair:
        sending = pair.client._core.data_path.sender._memory.view
        receiving = pair.server._core.data_path._buffer
        await pair.client.send(b"read me" * 100)
        assert await pair.server.receive(7) == b"read me"
        assert any(sending)
        assert any(receiving)
        for stream, memory in ((pair.client, sending), (pair.server, receiving)):
            await stream.aclose()
            assert not any(memory)
