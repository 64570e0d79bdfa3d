"""Data that goes to the peer on another node and back. Each byte of it is checked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import loops
from network_peer import Peer
from streaming import pattern

import aiordma
from aiordma import (
    ByteStream,
    ConnectError,
    Connection,
    ConnectionClosed,
    ConnectionOptions,
    MessageOptions,
    MessageStream,
    RemoteBuffer,
    StreamOptions,
)
from aiordma.enums import TransportType, WcStatus
from aiordma.rdmacm import DeviceAddress

# The peer answers within 3 s (iWARP) or 7 attempts of 67 ms or more (RoCE), or not at all.
QUICK = {"keepalive": 1.0, "peer_timeout": 3.0, "ack_timeout": 14}
# Long enough for a machine that runs slowly beside others.
PATIENT = {"keepalive": 1.0, "peer_timeout": 6.0, "ack_timeout": 17}
CONNECTIONS = 40
"""Connections that may end before an exchange is complete."""


def options_for_losses(address: DeviceAddress) -> dict[str, float]:
    """Return the options of a connection that loses packets.

    On RoCE, a lost packet is sent again after 67 ms, and the device gives up after 7 attempts. Then
    its side sends one message to disconnect, which can be lost, too: `keepalive` ends the other
    side. (Soft-iWARP disconnects over TCP, and its keepalive can end a healthy connection.)
    """
    is_iwarp = address.transport is TransportType.IWARP
    return {"ack_timeout": 14, "keepalive": 0.0 if is_iwarp else 1.0}


async def exchange_messages(connection: Connection, count: int) -> None:
    """Have messages of growing sizes sent back."""
    for number in range(count):
        message = pattern(number * 700, seed=number)
        await connection.send(message)
        assert await connection.recv() == message


async def exchange_memory(connection: Connection, nbytes: int) -> None:
    """Write to the peer's memory, and read it again."""
    await connection.send(b"M")
    remote = RemoteBuffer.unpack(await connection.recv())[:nbytes]
    data = bytearray(pattern(nbytes, seed=77))
    async with await connection.register(data) as source:
        await connection.write(source, remote)
    async with await connection.allocate(nbytes, connection.read_access) as target:
        await connection.read(remote, target)
        assert digest(memoryview(target)) == digest(data)


async def exchange_stream(stream: ByteStream, nbytes: int) -> None:
    """Have bytes sent back, and the end of them."""
    data = pattern(nbytes)

    async def send() -> None:
        await stream.send(data)
        await stream.send_eof()

    sending = loops.create_task(send())
    try:
        received = b"".join([chunk async for chunk in stream])
    except aiordma.RdmaError:
        await loops.gather(sending, return_exceptions=True)  # it has ended, too
        raise
    await sending
    assert digest(received) == digest(data)


async def exchange_any_size(stream: MessageStream, sizes: Sequence[int]) -> None:
    """Have messages of several frames sent back, and the end of them."""
    messages = [[pattern(size, seed=size), b"", pattern(7)] for size in sizes]

    async def send() -> None:
        for message in messages:
            await stream.send(message)
        await stream.send_eof()

    sending = loops.create_task(send())
    received: list[list[bytes]] = []
    try:
        while len(received) < len(messages):
            with await stream.recv_message() as message:
                received.append([bytes(frame) for frame in message.frames])
    except aiordma.RdmaError:
        await loops.gather(sending, return_exceptions=True)  # it has ended, too
        raise
    await sending
    for got, wanted in zip(received, messages, strict=True):
        assert [digest(frame) for frame in got] == [digest(frame) for frame in wanted]


async def exchange_datagrams(peer: Peer, address: DeviceAddress, count: int) -> None:
    """Have datagrams sent back. Each is sent again until its answer comes."""
    port = await peer.command("serve_datagrams", peer.host(address))
    async with aiordma.open_datagram((address.host, 0)) as endpoint:
        target = await endpoint.resolve(peer.host(address), port)
        wanted = {number.to_bytes(2) + pattern(900, seed=number) for number in range(count)}
        answered: set[bytes] = set()

        async def receive() -> None:
            while answered != wanted:
                answered.add((await endpoint.recv_from()).data)
                assert answered <= wanted

        receiving = loops.create_task(receive())
        while not receiving.done():
            for datagram in wanted - answered:
                await endpoint.send_to(target, datagram)
            await loops.sleep(0.5)  # for the answers that are not lost
        await receiving


KERNEL_FAULTS = (WcStatus.REM_INV_REQ_ERR, WcStatus.LOC_PROT_ERR, WcStatus.GENERAL_ERR)
"""Statuses of requests that a soft device has failed without a reason."""


class SoftDeviceFailed(ConnectionClosed):
    """A soft device has failed a request by a fault of its own: see kernel_faults_as_closed()."""


@contextlib.contextmanager
def kernel_faults_as_closed() -> Iterator[None]:
    """Raise SoftDeviceFailed if a request has failed by a fault of a soft device.

    If the program of the peer is killed in the middle of a transfer, soft-RoCE can report
    REM_INV_REQ_ERR. If the peer is sending when the read of `keepalive` arrives, soft-iWARP answers
    this read of no bytes with the bytes that it sends: LOC_PROT_ERR or GENERAL_ERR.
    """
    try:
        yield
    except aiordma.WorkRequestError as error:
        if error.status not in KERNEL_FAULTS:
            raise
        raise SoftDeviceFailed("a soft device has failed") from error


async def until_whole(attempt: Callable[[], Awaitable[None]]) -> int:
    """Repeat an exchange over new connections until one is whole. Return their number.

    A device gives up a connection after some losses. The exchange must then end with an error of
    the peer or of the network, and with no wrong byte.
    """
    for number in range(1, CONNECTIONS + 1):
        try:
            await attempt()
        except (ConnectError, ConnectionClosed):
            continue
        return number
    raise AssertionError(f"none of {CONNECTIONS} connections was whole")


async def connection_to(peer: Peer, address: DeviceAddress, **options: Any) -> Connection:
    """Connect to a server of messages on the peer. Both sides have the same options."""
    port = await peer.command("serve_messages", peer.host(address), **options)
    return await aiordma.connect(peer.host(address), port, options=ConnectionOptions(**options))


async def stream_to(peer: Peer, address: DeviceAddress, **options: Any) -> ByteStream:
    """Connect a byte stream to the peer. Both sides have the same options."""
    port = await peer.command("serve_streams", peer.host(address), **options)
    return await aiordma.connect_stream(peer.host(address), port, options=StreamOptions(**options))


async def held_connection_to(peer: Peer, address: DeviceAddress, **options: Any) -> Connection:
    """Connect to a connection of the peer that only commands use. Both have the same options."""
    host, options_here = peer.host(address), ConnectionOptions(**options)
    port = await peer.command("hold_connections", host, **options)
    connection = await aiordma.connect(host, port, options=options_here)
    await peer.command("until_held")
    return connection


async def held_stream_to(peer: Peer, address: DeviceAddress, **options: Any) -> ByteStream:
    """Connect to a byte stream of the peer that only commands use. Both have the same options."""
    host, options_here = peer.host(address), StreamOptions(**options)
    port = await peer.command("hold_streams", host, **options)
    stream = await aiordma.connect_stream(host, port, options=options_here)
    await peer.command("until_held")
    return stream


async def messages_to(peer: Peer, address: DeviceAddress, **options: Any) -> MessageStream:
    """Connect a message stream to the peer. Both sides have the same options."""
    port = await peer.command("serve_any_size", peer.host(address), **options)
    message_options = MessageOptions(connection=ConnectionOptions(**options))
    return await aiordma.connect_messages(peer.host(address), port, options=message_options)


@contextlib.asynccontextmanager
async def both_to(
    peer: Peer, address: DeviceAddress, **options: Any
) -> AsyncIterator[tuple[Connection, ByteStream]]:
    """Connect a connection and a byte stream to the peer. They are closed after the block."""
    async with (
        await connection_to(peer, address, **options) as connection,
        await stream_to(peer, address, **options) as stream,
    ):
        yield connection, stream


async def listener_stats(peer: Peer) -> dict[str, int]:
    """Return the counters of the listener that the peer made last."""
    stats: dict[str, int] = await peer.command("listener_stats")
    return stats


async def until_counted(peer: Peer, counter: str, count: int = 1) -> None:
    """Wait until a counter of the peer's last listener has reached `count`."""

    async def has_counted() -> bool:
        return (await listener_stats(peer))[counter] >= count

    await loops.until(has_counted, f"the listener of the peer to have {counter} {count}")


async def until_requested(peer: Peer, count: int = 1) -> None:
    """Wait until `count` requests wait at the peer's last listener."""
    await until_counted(peer, "requests_waiting", count)


async def check_service(peer: Peer, address: DeviceAddress) -> None:
    """Check that a new connection and a new stream work."""
    async with await connection_to(peer, address) as connection:
        await exchange_messages(connection, 3)
    async with await stream_to(peer, address) as stream:
        await exchange_stream(stream, 5000)
    async with await messages_to(peer, address) as messages:
        await exchange_any_size(messages, [10, 50_000])


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return a hash of data, so that a failed assertion prints little."""
    return hashlib.sha256(data).hexdigest()
