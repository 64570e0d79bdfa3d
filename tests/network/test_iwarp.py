"""A peer that stops the connection manager of the kernel for iWARP, with two frames.

In a connection that the peer has requested as peer-to-peer, its first frame establishes the
connection. If this frame is wrong, siw closes the connection before it is established, which iw_cm
does not expect: `kernel BUG at drivers/infiniband/core/iwcm.c`. Found by the campaign of malformed
data. If this test fails because a kernel survives it, the limit in docs/security.md has ended.
"""

from __future__ import annotations

import asyncio

import loops
import mpa
import pytest
from exchanges import check_service
from helpers import TIME_LIMIT
from network_peer import Peer

from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.campaign, pytest.mark.transport("IWARP"), pytest.mark.loops("asyncio")]


async def test_after_a_wrong_first_frame_only_a_reboot_helps(
    peer: Peer, address: DeviceAddress
) -> None:
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
        await loops.to_thread(peer.power_off)
        await loops.to_thread(peer.mend)
        await check_service(peer, address)
