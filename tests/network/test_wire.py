"""Faults of the wire: no byte is lost or wrong, and every wait ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import loops
import pytest
from exchanges import (
    QUICK,
    both_to,
    check_service,
    connection_to,
    exchange_any_size,
    exchange_datagrams,
    exchange_memory,
    exchange_messages,
    exchange_stream,
    messages_to,
    options_for_losses,
    stream_to,
    until_whole,
)
from helpers import TIME_LIMIT
from network_peer import Peer

import aiordma
from aiordma import PeerClosed, PeerTimeout
from aiordma.rdmacm import DeviceAddress

IMPAIRMENTS = {
    "0.1 % lost": "loss 0.1%",
    "1 % lost": "loss 1%",
    "5 % lost": "loss 5%",
    "20 % lost": "loss 20%",
    "200 ms late": "delay 200ms",
    "90 % 20 ms late, 10 % out of order": "delay 20ms reorder 10% 50%",
    "10 % twice": "duplicate 10%",
    "2 % corrupt": "corrupt 2%",
}
"""Impairments of both directions, in the words of tc-netem(8)."""

LARGE = bytes(1 << 20)
MIXED = pytest.param("delay 5ms loss 1% duplicate 5% corrupt 1%", id="a mixture")
EACH = [
    pytest.param(text, id=name, marks=pytest.mark.campaign) for name, text in IMPAIRMENTS.items()
]
impaired = pytest.mark.parametrize("impairment", [MIXED, *EACH])


@impaired
async def test_messages_and_memory_arrive_whole(
    peer: Peer, address: DeviceAddress, impairment: str
) -> None:
    async def attempt() -> None:
        async with await connection_to(peer, address, **options_for_losses(address)) as connection:
            await exchange_messages(connection, 10)
            await exchange_memory(connection, 20_000)

    await impair(peer, impairment, attempt)


@impaired
async def test_a_stream_arrives_whole(peer: Peer, address: DeviceAddress, impairment: str) -> None:
    async def attempt() -> None:
        async with await stream_to(peer, address, **options_for_losses(address)) as stream:
            await exchange_stream(stream, 50_000)

    await impair(peer, impairment, attempt)


@impaired
async def test_messages_of_any_size_arrive_whole(
    peer: Peer, address: DeviceAddress, impairment: str
) -> None:
    async def attempt() -> None:
        async with await messages_to(peer, address, **options_for_losses(address)) as stream:
            await exchange_any_size(stream, [0, 100, 4000, 30_000])

    await impair(peer, impairment, attempt)


@impaired
@pytest.mark.transport("IB")
async def test_datagrams_arrive_whole(peer: Peer, address: DeviceAddress, impairment: str) -> None:
    await impair(peer, impairment, partial(exchange_datagrams, peer, address, 10))


async def impair(peer: Peer, impairment: str, attempt: Callable[[], Awaitable[None]]) -> None:
    await loops.to_thread(peer.netem, *impairment.split())
    async with loops.timeout(2 * TIME_LIMIT):
        connections = await until_whole(attempt)
    print(f"connections needed: {connections}")


async def test_traffic_resumes_after_a_second_without_cable(
    peer: Peer, address: DeviceAddress
) -> None:
    """Time is the subject: the devices repeat for at least 15 s."""
    async with loops.timeout(TIME_LIMIT), await connection_to(peer, address) as connection:
        await exchange_messages(connection, 2)
        await loops.to_thread(peer.pull_cable)
        sending = loops.create_task(exchange_messages(connection, 10))
        await loops.sleep(1.0)
        assert not sending.done()
        await loops.to_thread(peer.plug_cable)
        await sending


CUTS: dict[str, Callable[[Peer], None]] = {
    "the cable": Peer.pull_cable,
    "to the peer": partial(Peer.block, to_peer=True),
    "from the peer": partial(Peer.block, from_peer=True),
}


@pytest.mark.campaign
@pytest.mark.parametrize("cut", CUTS)
async def test_a_wire_that_stays_cut_ends_every_wait(
    peer: Peer, address: DeviceAddress, cut: str
) -> None:
    """The peer notices it, too. If its packets pass, it may be the first, and disconnect."""
    errors = (PeerTimeout, PeerClosed) if cut == "to the peer" else PeerTimeout
    async with (
        loops.timeout(2 * TIME_LIMIT),
        both_to(peer, address, **QUICK) as (connection, stream),
        await messages_to(peer, address, **QUICK) as messages,
    ):
        await exchange_messages(connection, 2)
        await loops.to_thread(CUTS[cut], peer)
        began = loops.now()
        waits = (connection.recv, stream.receive, messages.recv, partial(messages.send, LARGE))
        waiting = [loops.create_task(wait()) for wait in waits]
        for task in waiting:
            with pytest.raises(errors):
                await task
        print(f"noticed after {loops.now() - began:.1f} s")
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


@pytest.mark.campaign
@pytest.mark.parametrize("lost", ["request", "reply"])
async def test_a_lost_request_or_reply_is_repeated(
    peer: Peer, address: DeviceAddress, lost: str
) -> None:
    """Time is the subject: the wire is healed after a second."""
    port = await peer.command("serve_messages", peer.host(address))
    peer.block(to_peer=lost == "request", from_peer=lost == "reply")
    async with loops.timeout(TIME_LIMIT):
        connecting = loops.create_task(aiordma.connect(peer.host(address), port))
        await loops.sleep(1.0)
        assert not connecting.done()
        await loops.to_thread(peer.unblock)
        async with await connecting as connection:
            await exchange_messages(connection, 3)
