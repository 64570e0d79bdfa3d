"""connect_stream() and listen_stream(), of streams and listeners that are trio's."""

from __future__ import annotations

import aiordma
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.trio.listener import RdmaListener
from aiordma.trio.stream import RdmaStream


async def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> RdmaStream:
    """Connect to whoever speaks rsocket, as trio.open_tcp_stream() does to TCP.

    As aiordma.connect_stream(), with its arguments, its exceptions (a ConnectError is an OSError,
    as trio's programs expect) and what cancelling does.
    """
    return RdmaStream(
        await aiordma.connect_stream(host, port, local_address=local_address, options=options)
    )


async def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> RdmaListener:
    """Listen for whoever speaks rsocket: a listener for trio.serve_listeners().

    As aiordma.listen_stream(), with its arguments, its exceptions and what cancelling does.
    """
    return RdmaListener(await aiordma.listen_stream(host, port, backlog=backlog, options=options))
