"""Helpers for byte streams and message streams: two connected ends, and data to compare."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import loops
import trustme
from helpers import Host

from aiordma import (
    ByteStream,
    MessageOptions,
    MessageStream,
    StreamListener,
    StreamOptions,
    connect_messages,
    connect_stream,
    listen_messages,
    listen_stream,
)
from aiordma.streams.stream_core import StreamCore

DEFAULT = StreamOptions()
DEFAULT_MESSAGES = MessageOptions()


@dataclass(frozen=True)
class StreamPair:
    """Two connected ends, and the listener."""

    client: ByteStream
    server: ByteStream
    listener: StreamListener


@contextlib.asynccontextmanager
async def streaming(
    address: Host, client: StreamOptions = DEFAULT, server: StreamOptions = DEFAULT
) -> AsyncIterator[StreamPair]:
    """Connect two ends on one device. After the block, abort those that are still open."""
    async with listen_stream(address.host, 0, options=server) as listener:
        accepting = loops.create_task(listener.accept())
        near = await connect_stream(*listener.local_address, options=client)
        far = await accepting
        try:
            yield StreamPair(near, far, listener)
        finally:
            near.abort()
            far.abort()
            await near.aclose()
            await far.aclose()


class MessageStreamPair(NamedTuple):
    """Both ends of a message stream."""

    client: MessageStream
    server: MessageStream


@contextlib.asynccontextmanager
async def message_streams(
    address: Host, options: MessageOptions = DEFAULT_MESSAGES
) -> AsyncIterator[MessageStreamPair]:
    """Yield both ends of a message stream on one device."""
    async with listen_messages(address.host, 0, options=options) as listener:
        accepting = loops.create_task(listener.accept())
        host, port = listener.local_address
        async with connect_messages(host, port, options=options) as near, await accepting as far:
            yield MessageStreamPair(near, far)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that count up in 4-byte steps, so that lost or moved bytes are found."""
    block = b"".join((seed + number).to_bytes(4, "big") for number in range(nbytes // 4 + 1))
    return block[:nbytes]


def is_full(receiver: StreamCore | ByteStream) -> bool:
    """Return True if the receive buffer of a stream is full.

    Until this side receives, the peer can post no more data.
    """
    core = receiver._core if isinstance(receiver, ByteStream) else receiver
    return core.data_path.protocol.inbound.available == core.options.recv_buffer


async def receive_exactly(stream: ByteStream, nbytes: int) -> bytes:
    """Receive exactly `nbytes` bytes."""
    received = bytearray()
    while len(received) < nbytes:
        data = await stream.receive(nbytes - len(received))
        assert data, f"the stream ended after {len(received)} of {nbytes} bytes"
        received += data
    return bytes(received)


async def receive_all(stream: ByteStream) -> bytes:
    """Receive until the end of the stream."""
    return b"".join([data async for data in stream])


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the context of the server "rdma.example", and that of a client that trusts it."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("rdma.example").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client
