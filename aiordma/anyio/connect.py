"""connect() and listen(), and likewise for byte streams, of streams and listeners of anyio's."""

from __future__ import annotations

import aiordma
from aiordma.anyio.byte_listener import RdmaByteListener
from aiordma.anyio.byte_stream import RdmaByteStream
from aiordma.anyio.message_listener import MessageListener
from aiordma.anyio.message_stream import MessageStream
from aiordma.loop.awaitable_context_manager import Opening
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.streams import StreamOptions
from aiordma.streams.options import DEFAULT_OPTIONS as DEFAULT_STREAM_OPTIONS


def connect(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> Opening[MessageStream]:
    """Connect to a listening peer: `await connect(...)` or `async with connect(...) as stream`.

    As aiordma.connect(), with its arguments, its exceptions (a ConnectError is an OSError, as
    programs of anyio's expect) and what cancelling does.
    """

    async def connecting() -> MessageStream:
        connection = await aiordma.connect(
            host, port, local_address=local_address, private_data=private_data, options=options
        )
        return MessageStream(connection)

    return Opening(connecting())


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> Opening[MessageListener]:
    """Listen for peers: `await listen(...)` or `async with listen(...) as listener`.

    As aiordma.listen(), with its arguments, its exceptions and what cancelling does.
    """

    async def listening() -> MessageListener:
        listener = await aiordma.listen(host, port, backlog=backlog, options=options)
        return MessageListener(listener)

    return Opening(listening())


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_STREAM_OPTIONS,
) -> Opening[RdmaByteStream]:
    """Connect to whoever speaks rsocket: `await connect_stream(...)`, or `async with`.

    As aiordma.connect_stream(), with its arguments, its exceptions and what cancelling does.
    """

    async def connecting() -> RdmaByteStream:
        return RdmaByteStream(
            await aiordma.connect_stream(host, port, local_address=local_address, options=options)
        )

    return Opening(connecting())


def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_STREAM_OPTIONS,
) -> Opening[RdmaByteListener]:
    """Listen for whoever speaks rsocket: `await listen_stream(...)`, or `async with`.

    As aiordma.listen_stream(), with its arguments, its exceptions and what cancelling does.
    """

    async def listening() -> RdmaByteListener:
        return RdmaByteListener(
            await aiordma.listen_stream(host, port, backlog=backlog, options=options)
        )

    return Opening(listening())
