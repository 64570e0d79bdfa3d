"""Peers that break the kernel's iWARP: siw does not survive them, and only a reboot helps.

Found by the campaign of malformed data. If a test fails because a kernel survives it, the limit in
docs/security.md has ended.
"""

from __future__ import annotations

import asyncio
import socket

import loops
import mpa
import pytest
from exchanges import check_service
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


def connect_and_close(host: str, port: int) -> None:
    """Connect over TCP, so that the last segment of the handshake is the end of the connection.

    With TCP_QUICKACK off, the kernel does not confirm the peer's answer before it has more to send.
    """
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        connection.connect((host, port))


async def test_a_tcp_connection_that_is_closed_at_once_ends_a_listener(
    peer: Peer, address: DeviceAddress
) -> None:
    """siw takes the end of a TCP connection that it has not accepted for that of the listener."""
    host = peer.host(address)
    port = await peer.command("serve_messages", host)
    await loops.to_thread(connect_and_close, host, port)
    async with loops.timeout(2 * TIME_LIMIT):
        with pytest.raises(aiordma.Rejected):
            await aiordma.connect(host, port)
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
