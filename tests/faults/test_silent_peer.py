"""The peer's machine stops answering, as if its power were cut: typed errors end every wait.

Two ends are on this machine, so the peer is made silent in its place. On RoCE its queue pair is
reset: it then answers no packet. On iWARP no TCP packet reaches the address any more.
"""

from __future__ import annotations

import asyncio
import contextlib

import loops
import mpa
import pytest
from cm_ids import SMALL
from helpers import TIME_LIMIT, connected, is_receiving
from silence import queue_pair_of, silent
from streaming import streaming

import aiordma
from aiordma import AsyncCmId, Connection, ConnectionOptions, PeerTimeout, StreamOptions
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, parse_address

# 7 times 0.27 s on RoCE, and 3 s on iWARP, also on a machine that is busy.
QUICK = {"ack_timeout": 16, "peer_timeout": 3.0}
SENDING = ConnectionOptions(**QUICK)  # type: ignore[arg-type]
WATCHING = ConnectionOptions(keepalive=1.0, **QUICK)  # type: ignore[arg-type]

# The exchange before the silence is on every loop alike; each test waits some seconds.
pytestmark = pytest.mark.loops("asyncio", "trio")


async def test_keepalive_ends_a_wait_on_an_idle_connection(address: DeviceAddress) -> None:
    async with connected(address, WATCHING) as pair:
        await exchange(pair.client, pair.server)
        receiving = loops.create_task(pair.client.recv())
        await loops.until(lambda: is_receiving(pair.client), "the task to wait")
        with silent(address, queue_pair_of(pair.server)):
            with pytest.raises(PeerTimeout):
                await loops.wait_for(receiving, TIME_LIMIT)
            await pair.client.aclose()
            pair.server.abort()
            await pair.server.aclose()


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_send_ends_the_connection(address: DeviceAddress, accepted: bool) -> None:
    """Without keepalive: the device repeats the send on RoCE, a check follows it on iWARP."""
    async with connected(address, SENDING, SENDING) as pair:
        await exchange(pair.client, pair.server)
        end, peer = (pair.server, pair.client) if accepted else (pair.client, pair.server)
        with silent(address, queue_pair_of(peer)):
            await end.send(b"unanswered")
            with pytest.raises(PeerTimeout):
                await loops.wait_for(end.recv(), TIME_LIMIT)
            for one in (end, peer):
                one.abort()
                await one.aclose()


async def exchange(client: Connection, server: Connection) -> None:
    """Send a message both ways."""
    await client.send(b"ping")
    assert await server.recv() == b"ping"
    await server.send(b"pong")
    assert await client.recv() == b"pong"


@pytest.mark.parametrize("keepalive", [0.0, 1.0])
async def test_a_stream_ends(address: DeviceAddress, keepalive: float) -> None:
    options = StreamOptions(keepalive=keepalive, **QUICK)  # type: ignore[arg-type]
    async with streaming(address, options) as pair:
        await pair.client.send(b"ping")
        assert await pair.server.receive() == b"ping"
        await pair.server.send(b"pong")
        assert await pair.client.receive() == b"pong"
        with silent(address, queue_pair_of(pair.server)):
            if not keepalive:
                await pair.client.send(b"unanswered")
            with pytest.raises(PeerTimeout):
                await loops.wait_for(pair.client.receive(), TIME_LIMIT)
            for one in (pair.client, pair.server):
                one.abort()
                await one.aclose()


@pytest.mark.transport("IB")
async def test_retries_for_ever_that_the_peer_has_chosen_end_on_this_side(
    address: DeviceAddress,
) -> None:
    """rxe takes a retry count of 7, which C programs use, for ever."""
    async with aiordma.listen(address.host, 0, options=SENDING) as listener:
        accepting = loops.create_task(listener.accept())
        async with await AsyncCmId.create() as client:
            await client.resolve_addr(parse_address(*listener.local_address))
            await client.resolve_route()
            qp = await client.create_qp(SMALL)
            await client.connect(ConnectionParameters(retry_count=7, rnr_retry_count=7))
            server = await accepting
            with silent(address, qp):
                await server.send(b"unanswered")
                with pytest.raises(PeerTimeout, match="RETRY_EXC_ERR"):
                    await loops.wait_for(server.recv(), TIME_LIMIT)
            server.abort()
            await server.aclose()


@pytest.mark.transport("IWARP")
@pytest.mark.loops("asyncio")
async def test_a_peer_that_allows_no_reads_is_not_probed(address: DeviceAddress) -> None:
    """siw ends the connection if a read is posted. No other siw allows none: the peer is plain TCP.

    A send must have an answer within `peer_timeout`, in which there are three checks.
    """
    frames: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await mpa.read_request(reader)
        writer.write(mpa.reply(reads=0))
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                frames.append((await mpa.read_frame(reader))[0])
        writer.close()

    options = ConnectionOptions(peer_timeout=0.3)
    server = await asyncio.start_server(serve, address.host)
    async with server, await aiordma.connect(*server_address(server), options=options) as client:
        await client.send(b"unanswered")
        await loops.until(lambda: frames, "the message to arrive")
        await loops.sleep(1.0)  # checks would be made in this time
        writers[0].write(mpa.send(b"still connected"))
        assert await client.recv() == b"still connected"
        assert frames == [mpa.SEND]
        with pytest.raises(ValueError, match="initiator_depth 0"):
            await client.read(aiordma.RemoteBuffer(0, 0, 1), [])
        client.abort()


def server_address(server: asyncio.Server) -> tuple[str, int]:
    """Return the host and the port of a TCP server."""
    host, port = server.sockets[0].getsockname()[:2]
    return host, port
