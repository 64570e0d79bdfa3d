"""connect_stream() and listen_stream(): byte streams on any event loop."""

from __future__ import annotations

from aiordma.cm import AsyncCmId
from aiordma.cm.establishing import dial, listening_ids
from aiordma.loop.awaitable_context_manager import Opening
from aiordma.streams.listener import StreamListener
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream import ByteStream
from aiordma.streams.stream_core import Pipe


def connect_stream(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> Opening[ByteStream]:
    """Connect to whoever speaks rsocket: `await connect_stream(...)`, or `async with`.

    `host` is a name or an IPv4 or IPv6 address; the addresses of a name are tried in turn.
    `local_address` is where to connect from.

    Cancelling leaves nothing behind. See rsocket(7), rconnect.

    Raises:
        ProtocolError: who listens there speaks something else.
        Others: as connect().
    """

    async def connecting() -> ByteStream:
        return ByteStream(await dial_pipe(host, port, local_address, options))

    return Opening(connecting())


async def dial_pipe(
    host: str, port: int, local_address: tuple[str, int] | None, options: StreamOptions
) -> Pipe:
    """What a stream is made of, for other shells. Raises: as connect_stream()."""

    async def finish(cm: AsyncCmId) -> Pipe:
        return await Pipe.connected(cm, options)

    return await dial(host, port, local_address, options.of_connection(), finish)


def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> Opening[StreamListener]:
    """Listen for whoever speaks rsocket: `await listen_stream(...)`, or `async with`.

    `host`, `port`, `backlog` and what is raised are those of listen(). `options` are those of the
    streams that are accepted.

    Cancelling leaves nothing behind. See rsocket(7), rlisten.
    """

    async def listening() -> StreamListener:
        return StreamListener(
            await listening_ids(host, port, backlog, options.of_connection()), options
        )

    return Opening(listening())
