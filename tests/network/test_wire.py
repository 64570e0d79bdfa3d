"""Faults of the wire: no byte is lost or wrong, and every wait ends."""

from __future__ import annotations

from collections.abc import Callable

import loops
import pytest
from exchanges import (
    QUICK,
    connection_to,
    exchange_datagrams,
    exchange_memory,
    exchange_messages,
    exchange_stream,
    stream_to,
)
from helpers import TIME_LIMIT
from network_peer import HERE, Peer

from aiordma import PeerTimeout
from aiordma.rdmacm import DeviceAddress

# Both directions lose, delay, reorder, duplicate and corrupt packets.
MIXED = ["delay", "20ms", "10ms", "loss", "1%", "duplicate", "5%", "corrupt", "1%"]


async def test_messages_and_memory_arrive_whole(peer: Peer, address: DeviceAddress) -> None:
    peer.netem(*MIXED)
    async with loops.timeout(TIME_LIMIT), await connection_to(peer, address) as connection:
        await exchange_messages(connection, 10)
        await exchange_memory(connection, 20_000)


async def test_a_stream_arrives_whole(peer: Peer, address: DeviceAddress) -> None:
    peer.netem(*MIXED)
    async with loops.timeout(TIME_LIMIT), await stream_to(peer, address) as stream:
        await exchange_stream(stream, 50_000)


@pytest.mark.transport("IB")
async def test_datagrams_arrive_whole(peer: Peer, address: DeviceAddress) -> None:
    peer.netem(*MIXED)
    async with loops.timeout(TIME_LIMIT):
        await exchange_datagrams(peer, address, 10)


async def test_traffic_resumes_after_a_second_without_cable(
    peer: Peer, address: DeviceAddress
) -> None:
    """Time is the subject: the devices repeat for at least 15 s."""
    async with loops.timeout(TIME_LIMIT), await connection_to(peer, address) as connection:
        await exchange_messages(connection, 2)
        await loops.to_thread(peer.node.pull_cable)
        sending = loops.create_task(exchange_messages(connection, 10))
        await loops.sleep(1.0)
        assert not sending.done()
        await loops.to_thread(peer.node.plug_cable)
        await sending


@pytest.mark.parametrize("cut", ["cable", "to the peer", "from the peer"])
async def test_a_wire_that_stays_cut_ends_every_wait(
    peer: Peer, address: DeviceAddress, cut: str
) -> None:
    async with loops.timeout(TIME_LIMIT):
        connection = await connection_to(peer, address, **QUICK)
        stream = await stream_to(peer, address, **QUICK)
        await exchange_messages(connection, 2)
        await loops.to_thread(CUTS[cut], peer)
        waiting = [loops.create_task(wait()) for wait in (connection.recv, stream.receive)]
        for task in waiting:
            with pytest.raises(PeerTimeout):
                await task
        for end in (connection, stream):
            await end.aclose()
        await loops.to_thread(peer.mend)
        async with await connection_to(peer, address) as again:
            await exchange_messages(again, 2)


CUTS: dict[str, Callable[[Peer], None]] = {
    "cable": lambda peer: peer.node.pull_cable(),
    "to the peer": lambda peer: HERE.block(peer.node.name),
    "from the peer": lambda peer: peer.node.block(HERE.name),
}
