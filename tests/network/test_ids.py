"""Ids of both kinds, used directly: the peer's machine or the wire fails in each of their waits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import loops
import pytest
from cm_ids import MESSAGE_SIZE, SMALL, CmId, Kind, OwnQueuePair, both_kinds, listening, resolved
from exchanges import check_service, listener_stats, until_counted, until_requested
from helpers import TIME_LIMIT, has_waiter, kernel_parameter, run_program
from network_peer import Peer

from aiordma import AddressError, ConnectError
from aiordma.cm import CmState
from aiordma.enums import QpState, WcStatus
from aiordma.rdmacm import ConnectionParameters, DeviceAddress, parse_address

pytestmark = pytest.mark.campaign

T = TypeVar("T")

# Soft-RoCE takes 7 retries for ever.
FINITE = ConnectionParameters(retry_count=6)
FAULTS: dict[str, Callable[[Peer], None]] = {
    "power cut": Peer.power_off,
    "SIGKILL": Peer.kill,
    "cable pulled": Peer.pull_cable,
}


@asynccontextmanager
async def connected_to(where: tuple[str, int], kind: Kind) -> AsyncIterator[CmId]:
    """Yield an id that is connected, with a receive posted, and with memory for a message."""
    async with await resolved(where, kind) as cm:
        inbox = await cm.reg_msgs(bytearray(MESSAGE_SIZE))
        cm.cm_id.post_recv(1, inbox, 0, MESSAGE_SIZE)
        await cm.connect(FINITE)
        yield cm


async def send(cm: CmId) -> None:
    """Post one message."""
    outbox = await cm.reg_msgs(bytearray(b"hello"))
    cm.cm_id.post_send(2, outbox, 0, 5)


@both_kinds
@pytest.mark.parametrize("fault", FAULTS)
async def test_every_wait_of_an_id_ends(
    peer: Peer, address: DeviceAddress, kind: Kind, fault: str
) -> None:
    """Ids that connect, accept, wait for a completion, and disconnect.

    On iWARP accept() needs no packet of the peer.
    """
    host = peer.host(address)
    serving = host, await peer.command("serve_messages", host)
    silent = host, await peer.command("listen_only", host)
    refused = suppress(ConnectError) if is_iwarp(address) else pytest.raises(ConnectError)
    async with (
        loops.timeout(2 * TIME_LIMIT),
        await listening(address, kind) as listener,
        await resolved(silent, kind) as connecting,
        connected_to(serving, kind) as receiving,
        connected_to(serving, kind) as disconnecting,
    ):
        await peer.command("connect_to", *listener.local_address)
        async with await listener.get_request() as accepting:
            await accepting.create_qp(SMALL)
            connect = loops.create_task(timed("connect", connecting.connect()))
            await until_requested(peer)
            receive = loops.create_task(timed("get_recv_comp", receiving.get_recv_comp()))
            await loops.until(lambda: has_waiter(receiving), "a thread to wait for a completion")
            # TCP gives up after 3 retries. By default it takes a quarter of an hour, and an id on
            # iWARP has no other limit: only connections check whether their peer answers.
            with kernel_parameter("net/ipv4/tcp_retries2", "3"):
                await loops.to_thread(FAULTS[fault], peer)
                if fault != "SIGKILL":
                    await send(receiving)  # a device that sends nothing notices nothing
                accept = loops.create_task(timed("accept", accepting.accept()))
                disconnect = loops.create_task(timed("disconnect", disconnecting.disconnect()))
                with pytest.raises(ConnectError):
                    await connect
                with refused:
                    await accept
                await disconnect
                assert (await receive).status is WcStatus.WR_FLUSH_ERR
        await loops.to_thread(peer.mend)
        await check_service(peer, address)


def is_iwarp(address: DeviceAddress) -> bool:
    """Return True if the device of an address is an iWARP device."""
    return address.transport.name == "IWARP"


async def timed(name: str, operation: Awaitable[T]) -> T:
    """Await an operation. Print how long it has taken."""
    began = loops.now()
    try:
        return await operation
    finally:
        print(f"{name} ended after {loops.now() - began:.1f} s")


@both_kinds
async def test_resolving_without_a_cable_fails_and_can_be_repeated(
    peer: Peer, address: DeviceAddress, kind: Kind
) -> None:
    host = peer.host(address)
    where = parse_address(host, await peer.command("serve_messages", host))
    async with loops.timeout(2 * TIME_LIMIT), await kind.create() as cm:
        await loops.to_thread(peer.pull_cable)
        run_program("ip", "neighbour", "flush", "all")
        with pytest.raises(AddressError):
            await cm.resolve_addr(where, timeout=1.0)
        await loops.to_thread(peer.plug_cable)
        await cm.resolve_addr(where, timeout=TIME_LIMIT)
        await cm.resolve_route()
        await cm.create_qp(SMALL)
        await cm.connect(FINITE)


# --- the confirmation of the connecting side ("ready to use"), which iWARP does not have ---


@asynccontextmanager
async def responded(
    peer: Peer, address: DeviceAddress, kind: Kind, handshake_timeout: float = 2 * TIME_LIMIT
) -> AsyncIterator[tuple[CmId, OwnQueuePair]]:
    """Yield an id that has received the reply of a server of messages, and confirmed nothing.

    Its queue pair can send and receive.
    """
    host = peer.host(address)
    port = await peer.command("serve_messages", host, handshake_timeout=handshake_timeout)
    async with await resolved((host, port), kind, init=None) as cm:
        own = OwnQueuePair(cm)
        try:
            own.modify(cm, QpState.INIT)
            await cm.connect(ConnectionParameters(retry_count=6, qp_num=own.qp.number))
            assert cm.state is CmState.RESPONDED
            own.modify(cm, QpState.RTR, QpState.RTS)
            yield cm, own
        finally:
            own.destroy()


@both_kinds
@pytest.mark.transport("IB")
async def test_a_lost_confirmation_is_repeated(
    peer: Peer, address: DeviceAddress, kind: Kind
) -> None:
    """The peer repeats its reply, which this side then confirms again."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        responded(peer, address, kind) as (cm, own),
    ):
        peer.block(to_peer=True)
        cm.establish()
        assert (await listener_stats(peer))["handshakes"] == 1
        began = loops.now()
        await loops.to_thread(peer.unblock)
        await until_counted(peer, "accepted")
        print(f"accepted after {loops.now() - began:.1f} s")
        assert await own.ask(b"hello") == b"hello"
    await check_service(peer, address)


@both_kinds
@pytest.mark.transport("IB")
async def test_a_message_takes_the_place_of_the_confirmation(
    peer: Peer, address: DeviceAddress, kind: Kind
) -> None:
    """This side never confirms. The peer's device reports the first message (COMM_EST)."""
    async with (
        loops.timeout(2 * TIME_LIMIT),
        responded(peer, address, kind) as (_, own),
    ):
        assert (await listener_stats(peer))["handshakes"] == 1
        assert await own.ask(b"hello") == b"hello"
        assert (await listener_stats(peer))["accepted"] == 1
    await check_service(peer, address)


@both_kinds
@pytest.mark.transport("IB")
@pytest.mark.parametrize("seconds", [2.0, 2 * TIME_LIMIT], ids=["listener", "connection manager"])
async def test_a_confirmation_that_stays_lost_ends_the_handshake(
    peer: Peer, address: DeviceAddress, kind: Kind, seconds: float
) -> None:
    """The listener of the peer ends it after its time limit, or the CM after its repetitions.

    On this side the id is connected, until the peer's rejection or disconnect arrives.
    """
    async with (
        loops.timeout(2 * TIME_LIMIT),
        responded(peer, address, kind, seconds) as (cm, _),
    ):
        began = loops.now()
        peer.block(to_peer=True)
        cm.establish()
        await until_counted(peer, "failed")
        print(f"the handshake ended after {loops.now() - began:.1f} s")
        await cm.disconnect()
        print(f"disconnected after {loops.now() - began:.1f} s")
        assert cm.state is CmState.DISCONNECTED
        await loops.to_thread(peer.mend)
        await check_service(peer, address)
