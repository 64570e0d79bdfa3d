"""The peer's machine loses power, its program dies or stops, its device goes away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import loops
import pytest
from exchanges import (
    PATIENT,
    QUICK,
    SoftDeviceFailed,
    both_to,
    check_service,
    connection_to,
    exchange_messages,
    kernel_faults_as_closed,
    messages_to,
    stream_to,
    until_requested,
)
from helpers import TIME_LIMIT
from network_peer import Peer

import aiordma
from aiordma import ByteStream, ConnectError, Connection, MessageStream, PeerClosed, PeerTimeout
from aiordma.rdmacm import DeviceAddress


async def send_messages(connection: Connection) -> None:
    while True:
        await exchange_messages(connection, 3)


async def send_large(stream: MessageStream) -> None:
    data = bytes(3 << 20)
    with kernel_faults_as_closed():
        while True:
            stream.send_soon(data)
            with await stream.recv_message():
                pass


async def send_bytes(stream: ByteStream) -> None:
    while True:
        await stream.send(bytes(10_000))
        await stream.receive()


@pytest.mark.parametrize(
    ("end", "options", "error"),
    [
        pytest.param(Peer.power_off, PATIENT, PeerTimeout, id="power cut"),
        pytest.param(Peer.kill, {}, PeerClosed, id="SIGKILL"),
    ],
)
async def test_every_wait_ends(
    peer: Peer,
    address: DeviceAddress,
    end: Callable[[Peer], None],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    """Connections that are idle, that send, and that close; and streams that send."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await connection_to(peer, address, **options) as idle,
        await connection_to(peer, address, **options) as busy,
        await connection_to(peer, address, **options) as closing,
        await stream_to(peer, address, **options) as stream,
        await messages_to(peer, address, **options) as messages,
    ):
        receiving = loops.create_task(idle.recv())
        transferring = loops.create_task(send_large(messages))
        sending = loops.create_task(send_messages(busy))
        streaming = loops.create_task(send_bytes(stream))
        await loops.until(lambda: busy.stats.messages_received > 2, "messages to be answered")
        await loops.until(lambda: messages.stats.messages_received > 0, "a large one, too")

        began = loops.now()
        await loops.to_thread(end, peer)
        await closing.aclose()
        for task in (receiving, sending, streaming):
            with pytest.raises(error):
                await task
        # The device can have failed the transfer, even before the peer ended.
        with pytest.raises((error, SoftDeviceFailed)):
            await transferring
        print(f"noticed after {loops.now() - began:.1f} s")
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


@pytest.mark.campaign
@pytest.mark.parametrize("end", [Peer.power_off, Peer.kill], ids=["power cut", "SIGKILL"])
@pytest.mark.parametrize("reached", [True, False], ids=["request arrived", "no request yet"])
async def test_connecting_ends(
    peer: Peer, address: DeviceAddress, end: Callable[[Peer], None], reached: bool
) -> None:
    """Connecting to a machine without power takes up to 102 s (soft-RoCE)."""
    port = await peer.command("listen_only", peer.host(address))
    async with loops.timeout(2 * TIME_LIMIT):
        connecting = loops.create_task(aiordma.connect(peer.host(address), port))
        if reached:
            await until_requested(peer)
        await loops.to_thread(end, peer)
        began = loops.now()
        with pytest.raises(ConnectError):
            await connecting
        print(f"ended after {loops.now() - began:.1f} s")
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


@pytest.mark.campaign
async def test_a_stopped_program_is_no_dead_machine(peer: Peer, address: DeviceAddress) -> None:
    """Its machine answers the keepalive. A time limit of the caller ends the wait."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        both_to(peer, address, **QUICK) as (connection, stream),
    ):
        await loops.to_thread(peer.suspend)
        await connection.send(b"are you there?")
        with pytest.raises(TimeoutError):
            await loops.wait_for(connection.recv(), 3 * QUICK["peer_timeout"])
        peer.resume()
        assert await connection.recv() == b"are you there?"
        await exchange_messages(connection, 3)
        await stream.send(b"and you?")
        assert await stream.receive() == b"and you?"


@pytest.mark.campaign
async def test_the_device_of_the_peer_is_removed_and_comes_back(
    peer: Peer, address: DeviceAddress
) -> None:
    driver = address.device.rstrip("0")
    link = partial(run_on_peer, peer, "rdma", "link")
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await connection_to(peer, address, **QUICK) as connection,
    ):
        receiving = loops.create_task(connection.recv())
        await loops.to_thread(link, "delete", address.device)
        try:
            with pytest.raises((PeerClosed, PeerTimeout)):
                await receiving
        finally:
            add = ("add", address.device, "type", driver, "netdev", f"{driver}-wire")
            await loops.to_thread(link, *add)

        async def is_served() -> bool:
            try:
                await check_service(peer, address)
            except (ConnectError, aiordma.ConnectionClosed, KeyError):
                return False
            return True

        await loops.until(is_served, "the device to have its addresses again")


def run_on_peer(peer: Peer, *argv: str) -> str:
    return peer.node.run(*argv)


@pytest.mark.campaign
@pytest.mark.may_block
@pytest.mark.parametrize("side", ["this side", "the peer"])
async def test_a_loop_that_is_stalled_ends_nothing(
    peer: Peer, address: DeviceAddress, side: str
) -> None:
    """A loop that does not run for longer than `peer_timeout`. Time is the subject."""
    seconds = 2 * QUICK["peer_timeout"]
    async with (
        loops.timeout(TIME_LIMIT),
        both_to(peer, address, **QUICK) as (connection, stream),
    ):
        await connection.send(b"one")
        await stream.send(b"one")
        if side == "this side":
            loops.block(seconds)
        else:
            await peer.command("stall", seconds)
        await connection.send(b"two")
        assert [await connection.recv() for _ in range(2)] == [b"one", b"two"]
        assert await stream.receive() == b"one"


@pytest.mark.campaign
async def test_both_sides_with_full_queues_go_on(peer: Peer, address: DeviceAddress) -> None:
    """Both sides send before they read: on RoCE, more than their queues hold.

    On iWARP a peer that sends more than `recv_depth` messages at once ends the connection.
    """
    count = 500 if address.transport.name == "IB" else 30
    port = await peer.command("serve_late", peer.host(address))
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await aiordma.connect(peer.host(address), port) as connection,
    ):
        await connection.send(b"%d" % count)

        async def send() -> None:
            for number in range(count):
                await connection.send(b"%d" % number)

        sending = loops.create_task(send())
        if address.transport.name == "IB":
            await loops.until(lambda: connection.stats.send_waits, "the send queue to be full")
        await peer.command("read")
        assert [int(await connection.recv()) for _ in range(count)] == [*range(count)]
        await sending
        assert await connection.recv() == b"read"
