"""Connections that end without a fault: close, abort and cancelled close."""

from __future__ import annotations

import loops
import pytest
from helpers import TIME_LIMIT, connected, is_receiving

import aiordma
from aiordma import ConnectionOptions, LocalClosed, PeerClosed
from aiordma.rdmacm import DeviceAddress


async def test_iteration_ends_and_recv_raises_when_the_peer_disconnects(
    address: DeviceAddress,
) -> None:
    async with connected(address) as pair:
        await pair.client.send(b"last words")
        await pair.client.aclose()
        assert [message async for message in pair.server] == [b"last words"]
        with pytest.raises(PeerClosed):
            await pair.server.recv()
        with pytest.raises(PeerClosed):
            await pair.server.send(b"too late")
        assert pair.server.closed


async def test_messages_sent_before_aclose_arrive(address: DeviceAddress) -> None:
    count = 30
    async with connected(address) as pair:
        for number in range(count):
            await pair.client.send(b"%d" % number * 500)
        await pair.client.aclose()
        received = [message async for message in pair.server]
    assert received == [b"%d" % number * 500 for number in range(count)]


async def test_disconnect_of_the_peer_ends_a_waiting_recv(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        receiving = loops.create_task(pair.server.recv())
        await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
        await pair.client.aclose()
        with pytest.raises(PeerClosed):
            await receiving


async def test_local_close_ends_a_waiting_recv(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        receiving = loops.create_task(pair.server.recv())
        await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
        await pair.server.aclose()
        with pytest.raises(LocalClosed):
            await receiving


async def test_both_ends_can_close_at_the_same_time(address: DeviceAddress) -> None:
    for _ in range(10):
        async with connected(address) as pair:
            await pair.client.send(b"x")
            await loops.gather(pair.client.aclose(), pair.server.aclose())


async def test_abort_ends_a_waiting_recv_of_the_peer(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        receiving = loops.create_task(pair.server.recv())
        await loops.until(lambda: is_receiving(pair.server), "a task to wait for a message")
        pair.client.abort()
        assert pair.client.closed
        with pytest.raises(aiordma.RdmaError):
            await receiving


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
    async with aiordma.listen(address.host, 0) as listener:
        accepting = loops.create_task(listener.accept())

        async def fail() -> None:
            async with aiordma.connect(*listener.local_address) as connection:
                await connection.send(b"before the mistake")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with await accepting as server:
            assert [message async for message in server] == [b"before the mistake"]


async def test_closing_a_listener_leaves_its_connections_open(address: DeviceAddress) -> None:
    async with connected(address) as pair:
        await pair.listener.aclose()
        await pair.client.send(b"still here")
        assert await pair.server.recv() == b"still here"
        with pytest.raises(LocalClosed):
            await pair.listener.get_request()
        assert [request async for request in pair.listener] == []


async def test_closing_a_listener_ends_a_waiting_get_request(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        waiting = loops.create_task(listener.get_request())
        await loops.settle()
        await listener.aclose()
        with pytest.raises(LocalClosed):
            await waiting
