"""connect() and listen(), of streams and listeners that are anyio's."""

from __future__ import annotations

import aiordma
from aiordma.anyio.message_listener import MessageListener
from aiordma.anyio.message_stream import MessageStream
from aiordma.opening import Opening
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions


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
