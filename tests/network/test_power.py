"""The power of the peer's machine is cut: every wait ends, and later the peer is served again."""

from __future__ import annotations

import loops
import pytest
from exchanges import QUICK, connection_to, exchange_messages, stream_to
from helpers import TIME_LIMIT
from network_peer import Peer

import aiordma
from aiordma import ByteStream, ConnectError, Connection, PeerTimeout
from aiordma.rdmacm import DeviceAddress


async def test_a_power_cut_ends_every_wait(peer: Peer, address: DeviceAddress) -> None:
    """Connections that are idle, that send, and that close; and a stream that sends."""
    async with loops.timeout(2 * TIME_LIMIT):
        idle, busy, closing = [await connection_to(peer, address, **QUICK) for _ in range(3)]
        stream = await stream_to(peer, address, **QUICK)
        receiving = loops.create_task(idle.recv())
        sending = loops.create_task(send_for_ever(busy))
        streaming = loops.create_task(stream_for_ever(stream))
        await loops.until(lambda: busy.stats.messages_received > 2, "messages to be answered")

        await loops.to_thread(peer.power_off)

        await closing.aclose()
        for task in (receiving, sending, streaming):
            with pytest.raises(PeerTimeout):
                await task
        for end in (idle, busy, stream):
            await end.aclose()
        with pytest.raises(ConnectError):
            await aiordma.connect(peer.host(address), 7471)

        await loops.to_thread(peer.mend)
        async with await connection_to(peer, address) as again:
            await exchange_messages(again, 2)


async def send_for_ever(connection: Connection) -> None:
    while True:
        await exchange_messages(connection, 3)


async def stream_for_ever(stream: ByteStream) -> None:
    while True:
        await stream.send(bytes(10_000))
        await stream.receive()
