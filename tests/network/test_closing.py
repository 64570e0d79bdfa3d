"""The peer's machine loses power, or its program is killed, at each step of closing."""

from __future__ import annotations

from typing import Any

import loops
import pytest
from exchanges import PATIENT, check_service, held_connection_to, held_stream_to
from helpers import TIME_LIMIT
from network_peer import Peer

from aiordma import ByteStream, Connection, PeerClosed, PeerTimeout
from aiordma.rdmacm import DeviceAddress

# Two tests, two loops: each test boots the peer's machine anew.
pytestmark = [pytest.mark.campaign, pytest.mark.loops("asyncio", "trio")]

CLOSE_SECONDS = 60.0
"""The time in which aclose() must return: `close_timeout`, and much for a slow machine."""

each_end = pytest.mark.parametrize("end", [Peer.power_off, Peer.kill], ids=["power cut", "SIGKILL"])
OPTIONS = {Peer.power_off: PATIENT, Peer.kill: {}}
ERRORS = {Peer.power_off: PeerTimeout, Peer.kill: PeerClosed}


@each_end
@pytest.mark.parametrize("closer", ["the peer", "this side", "both"])
async def test_closing_ends(peer: Peer, address: DeviceAddress, closer: str, end: Any) -> None:
    """The other side gets no answer: no packet to the peer passes, or none in either direction."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await held_connection_to(peer, address) as connection,
        await held_stream_to(peer, address) as stream,
    ):
        peer.block(to_peer=True, from_peer=closer == "both")
        if closer != "this side":
            await peer.command("close")
        if closer == "the peer":
            await loops.until(lambda: connection.closed, "the peer's disconnect to arrive")
            assert await stream.receive() == b""
        else:
            await connection.send(b"unanswered")
            await stream.send(b"unanswered")
        closing = [] if closer == "the peer" else [await begin(connection), await begin(stream)]
        began = loops.now()
        await loops.to_thread(end, peer)
        async with loops.timeout(CLOSE_SECONDS):
            await loops.gather(*(closing or (connection.aclose(), stream.aclose())))
        print(f"closed after {loops.now() - began:.1f} s")
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


async def begin(end: Connection | ByteStream) -> loops.Task[None]:
    """Begin to close."""
    return await loops.start(end.aclose())


@each_end
@pytest.mark.parametrize("finished", ["this side", "the peer"])
async def test_a_half_closed_stream_ends(
    peer: Peer, address: DeviceAddress, finished: str, end: Any
) -> None:
    """One side has finished sending. The other one does not, or does not receive."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await held_stream_to(peer, address, **OPTIONS[end]) as stream,
    ):
        if finished == "this side":
            await stream.send_eof()
            waiting = loops.create_task(stream.receive())
        else:
            await peer.command("send_eof")
            assert await stream.receive() == b""
            waiting = await loops.start(send_for_ever(stream))
        began = loops.now()
        await loops.to_thread(end, peer)
        with pytest.raises(ERRORS[end]):
            await waiting
        print(f"noticed after {loops.now() - began:.1f} s")
        began = loops.now()
        async with loops.timeout(CLOSE_SECONDS):
            await stream.aclose()
        print(f"closed after {loops.now() - began:.1f} s")
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


async def send_for_ever(stream: ByteStream) -> bytes:
    while True:
        await stream.send(bytes(10_000))
