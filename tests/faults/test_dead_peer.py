"""The process of the peer is killed. Every wait of this process ends soon, with a typed error."""

from __future__ import annotations

import signal

import loops
import mpa
import pytest
from helpers import TIME_LIMIT, cm_ids, end, is_receiving, read_line, start_python

import aiordma
from aiordma import ConnectionOptions, PeerClosed, RdmaError, WorkRequestError
from aiordma.rdmacm import DeviceAddress

SENDING_PEER = """
import asyncio, sys
import aiordma

async def send(connection):
    while True:
        await connection.send(b"x" * 2000)

async def receive(connection):
    async for _ in connection:
        pass

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        await connection.send(b"ready")
        print("ready", flush=True)
        await asyncio.gather(send(connection), receive(connection))

asyncio.run(main(*sys.argv[1:]))
"""

IDLE_PEER = """
import asyncio, sys
import aiordma

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        await connection.send(b"ready")
        print("ready", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


async def send_for_ever(connection: aiordma.Connection) -> None:
    while True:
        await connection.send(b"y" * 3000)
        await loops.sleep(0)


async def receive_for_ever(connection: aiordma.Connection) -> None:
    while True:
        await connection.recv()


@pytest.mark.transport("IB")
async def test_peer_killed_while_it_sends_ends_send_and_recv(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        peer = start_python(SENDING_PEER, host, str(port))
        try:
            async with loops.timeout(TIME_LIMIT), await listener.accept() as connection:
                assert await connection.recv() == b"ready"
                tasks = [
                    loops.create_task(send_for_ever(connection)),
                    loops.create_task(receive_for_ever(connection)),
                ]
                await loops.until(
                    lambda: (
                        connection.stats.messages_sent > 10
                        and connection.stats.messages_received > 10
                    ),
                    "messages in both directions",
                )
                assert not any(task.done() for task in tasks)
                peer.send_signal(signal.SIGKILL)
                results = await loops.gather(*tasks, return_exceptions=True)
                assert all(isinstance(r, (PeerClosed, WorkRequestError)) for r in results)
                assert connection.closed
        finally:
            await end(peer)


PING_PONG_PEER = """
import asyncio, sys
import aiordma

async def main(host, port):
    async with aiordma.connect(host, int(port)) as connection:
        while True:
            await connection.send(b"ping" * 500)
            await connection.recv()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_peer_killed_during_a_ping_pong_ends_it(address: DeviceAddress) -> None:
    async def echo(connection: aiordma.Connection) -> None:
        while True:
            await connection.send(await connection.recv())

    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        peer = start_python(PING_PONG_PEER, host, str(port))
        try:
            async with loops.timeout(TIME_LIMIT), await listener.accept() as connection:
                echoing = loops.create_task(echo(connection))
                await loops.until(lambda: connection.stats.messages_received > 10, "ten messages")
                assert not echoing.done()
                peer.send_signal(signal.SIGKILL)
                with pytest.raises((PeerClosed, WorkRequestError)):
                    await echoing
                assert connection.closed
        finally:
            await end(peer)


async def test_idle_peer_killed_ends_recv_and_send(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        peer = start_python(IDLE_PEER, host, str(port))
        try:
            async with loops.timeout(TIME_LIMIT), await listener.accept() as connection:
                assert await connection.recv() == b"ready"
                receiving = loops.create_task(connection.recv())
                await loops.until(lambda: is_receiving(connection), "the task to wait")
                peer.send_signal(signal.SIGKILL)
                with pytest.raises(PeerClosed):
                    await receiving
                with pytest.raises(PeerClosed):
                    await connection.send(b"too late")
        finally:
            await end(peer)


@pytest.mark.loops("asyncio", "trio")  # siw keeps a killed process for ten seconds
async def test_peer_killed_before_accept_makes_accept_fail(address: DeviceAddress) -> None:
    async with aiordma.listen(address.host, 0) as listener:
        host, port = listener.local_address
        peer = start_python(IDLE_PEER, host, str(port))
        try:
            async with loops.timeout(TIME_LIMIT):
                request = await listener.get_request()
                peer.send_signal(signal.SIGKILL)
                await loops.to_thread(peer.wait)
                # RoCE has no TCP connection. There accept() fails in any case: the peer's device
                # has sent a rejection.
                await loops.until(lambda: not mpa.is_connected(port), "the TCP connection to end")
                with pytest.raises(RdmaError):
                    await request.accept()
        finally:
            await end(peer)


LISTENING_PEER = """
import asyncio, sys
import aiordma

async def main(host):
    async with aiordma.listen(host, 0) as listener:
        print(listener.local_address[1], flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(sys.argv[1]))
"""


async def test_listening_peer_killed_makes_connect_fail(address: DeviceAddress) -> None:
    peer = start_python(LISTENING_PEER, address.host)
    try:
        port = int(await loops.to_thread(read_line, peer))
        before = cm_ids(address.device)
        connecting = loops.create_task(open_one((address.host, port)))
        # One is the id of this side. The other is the id of the request, in the peer.
        await loops.until(lambda: cm_ids(address.device) == before + 2, "the request to arrive")
        assert not connecting.done()
        peer.send_signal(signal.SIGKILL)
        async with loops.timeout(TIME_LIMIT):
            with pytest.raises(aiordma.ConnectError):
                await connecting
    finally:
        await end(peer)


async def open_one(where: tuple[str, int]) -> aiordma.Connection:
    return await aiordma.connect(*where, options=ConnectionOptions())
