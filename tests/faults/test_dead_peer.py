"""The process of the peer is killed. Every wait of this process ends soon, with a typed error."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from subprocess import Popen

import loops
import mpa
import pytest
from helpers import TIME_LIMIT, cm_ids, end, is_receiving, read_line, start_python

import aiordma
from aiordma import Connection, ConnectionClosed, PeerClosed, RdmaError, WorkRequestError
from aiordma.rdmacm import DeviceAddress

PEER = """
import asyncio, sys
import aiordma

async def send(connection):
    while True:
        await connection.send(b"x" * 2000)

async def receive(connection):
    async for _ in connection:
        pass

async def main(kind, host, port):
    if kind == "listen":
        async with aiordma.listen(host, 0) as listener:
            print(listener.local_address[1], flush=True)
            await asyncio.sleep(3600)
    async with aiordma.connect(host, int(port)) as connection:
        await connection.send(b"ready")
        if kind == "send":
            await asyncio.gather(send(connection), receive(connection))
        while kind == "ping-pong":
            await connection.send(await connection.recv())
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def started_peer(kind: str, host: str, port: int = 0) -> AsyncIterator[Popen[str]]:
    """Start the process of a peer. It connects to a listener, and sends messages or none."""
    peer = start_python(PEER, kind, host, str(port))
    try:
        async with loops.timeout(TIME_LIMIT):
            yield peer
    finally:
        await end(peer)


@contextlib.asynccontextmanager
async def connected_peer(
    kind: str, address: DeviceAddress
) -> AsyncIterator[tuple[Connection, Popen[str]]]:
    async with (
        aiordma.listen(address.host, 0) as listener,
        started_peer(kind, *listener.local_address) as peer,
        await listener.accept() as connection,
    ):
        assert await connection.recv() == b"ready"
        yield connection, peer


async def send_for_ever(connection: Connection) -> None:
    while True:
        await connection.send(b"y" * 3000)
        await loops.sleep(0)


async def receive_for_ever(connection: Connection) -> None:
    while True:
        await connection.recv()


async def ping_pong(connection: Connection) -> None:
    while True:
        await connection.send(b"ping" * 500)
        await connection.recv()


async def kill_busy_peer(
    address: DeviceAddress, kind: str, *calls: Callable[[Connection], Awaitable[None]]
) -> None:
    """Kill a peer while tasks send to it and receive from it. Both end with an error."""
    async with connected_peer(kind, address) as (connection, peer):
        tasks = [loops.create_task(call(connection)) for call in calls]

        def are_busy() -> bool:
            stats = connection.stats
            return stats.messages_sent > 10 and stats.messages_received > 10

        await loops.until(are_busy, "messages in both directions")
        assert not any(task.done() for task in tasks)
        peer.kill()
        results = await loops.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, (ConnectionClosed, WorkRequestError)) for r in results)
        assert connection.closed


@pytest.mark.transport("IB")
async def test_peer_killed_while_it_sends_ends_send_and_recv(address: DeviceAddress) -> None:
    await kill_busy_peer(address, "send", send_for_ever, receive_for_ever)


async def test_peer_killed_during_a_ping_pong_ends_it(address: DeviceAddress) -> None:
    await kill_busy_peer(address, "ping-pong", ping_pong)


async def test_idle_peer_killed_ends_recv_and_send(address: DeviceAddress) -> None:
    async with connected_peer("idle", address) as (connection, peer):
        receiving = loops.create_task(connection.recv())
        await loops.until(lambda: is_receiving(connection), "the task to wait")
        peer.kill()
        for call in (receiving, connection.send(b"too late")):
            with pytest.raises(PeerClosed):
                await call


@pytest.mark.loops("asyncio", "trio")  # siw keeps a killed process for ten seconds
async def test_peer_killed_before_accept_makes_accept_fail(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        async with started_peer("idle", host, port) as peer:
            request = await listener.get_request()
            peer.kill()
            await loops.to_thread(peer.wait)
            # RoCE has no TCP connection. There accept() fails in any case: the peer's device has
            # sent a rejection.
            await loops.until(lambda: not mpa.is_connected(port), "the TCP connection to end")
            with pytest.raises(RdmaError):
                await request.accept()


async def test_listening_peer_killed_makes_connect_fail(address: DeviceAddress) -> None:
    async with started_peer("listen", address.host) as peer:
        port = int(await loops.to_thread(read_line, peer))
        before = cm_ids(address.device)

        async def connect() -> None:
            await aiordma.connect(address.host, port)

        connecting = loops.create_task(connect())
        # One is the id of this side. The other is the id of the request, in the peer.
        await loops.until(lambda: cm_ids(address.device) == before + 2, "the request to arrive")
        assert not connecting.done()
        peer.kill()
        with pytest.raises(aiordma.ConnectError):
            await connecting
