"""Peers that break the kernel's iWARP: siw does not survive them, and only a reboot helps.

Found by the campaign of malformed data. If a test fails because a kernel survives it, the limit in
docs/security.md has ended.
"""

from __future__ import annotations

import asyncio

import loops
import mpa
import pytest
from exchanges import check_service, exchange_messages
from helpers import TIME_LIMIT
from network_peer import Peer

import aiordma
from aiordma.rdmacm import DeviceAddress

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.transport("IWARP"),
    pytest.mark.loops("asyncio"),
    pytest.mark.may_block,
]


async def reboot(peer: Peer, address: DeviceAddress) -> None:
    """Boot the peer again, and check that it serves."""
    await loops.to_thread(peer.power_off)
    await loops.to_thread(peer.mend)
    await check_service(peer, address)


async def test_tcp_connections_that_are_closed_at_once_end_a_listener(
    peer: Peer, address: DeviceAddress
) -> None:
    """siw takes the end of a TCP connection that it has not accepted for that of the listener."""
    host = peer.host(address)
    port = await peer.command("serve_messages", host)

    async def is_refused() -> bool:
        scans = [asyncio.open_connection(host, port) for _ in range(40)]
        for opened in await asyncio.gather(*scans, return_exceptions=True):
            if not isinstance(opened, BaseException):
                opened[1].close()
        try:
            async with await aiordma.connect(host, port) as connection:
                await exchange_messages(connection, 1)
        except aiordma.Rejected:
            return True
        return False

    async with loops.timeout(2 * TIME_LIMIT):
        while not await is_refused():
            pass
        await reboot(peer, address)


async def test_a_wrong_first_frame_stops_the_connection_manager(
    peer: Peer, address: DeviceAddress
) -> None:
    """In a connection that the peer has requested as peer-to-peer, its first frame establishes it.

    If this frame is wrong, siw closes the connection before it is established, which iw_cm does not
    expect.
    """
    host = peer.host(address)
    port = await peer.command("serve_messages", host)

    async def kernel_has_failed() -> bool:
        messages = await loops.to_thread(peer.node.run, "dmesg")
        return "kernel BUG at drivers/infiniband/core/iwcm.c" in messages

    async with loops.timeout(2 * TIME_LIMIT):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(mpa.request(flags=mpa.PEER_TO_PEER))
        await mpa.read_reply(reader)
        # siw replies before it takes over the connection: it processes the frame only then
        while not await kernel_has_failed():
            writer.write(mpa.with_wrong_version(mpa.send(b"wrong")))
        writer.close()
        await reboot(peer, address)
