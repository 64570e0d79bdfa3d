"""TLS on a StreamTransport, by the loop's own start_tls()."""

from __future__ import annotations

import asyncio
from ssl import SSLContext

from aiordma.asyncio.transport import StreamTransport

NOT_HERE = (
    "this event loop puts TLS on its own transports only: uvloop, for one. Use asyncio's loop, or "
    "the byte streams of aiordma.anyio with anyio's TLSStream"
)


def check_tls(loop: asyncio.AbstractEventLoop, ssl: SSLContext | None) -> None:
    """Make sure that TLS can be had here, if it is wanted.

    Raises:
        ValueError: the event loop cannot do it.
        TypeError: `ssl` is no SSLContext.
    """
    if ssl is None:
        return
    if not isinstance(ssl, SSLContext):
        raise TypeError(f"ssl is {ssl!r}, not an SSLContext: see ssl.create_default_context()")
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise ValueError(NOT_HERE)


class _Silent(asyncio.Protocol):
    """Until there is TLS, nobody hears of the connection."""


async def start_tls(
    transport: StreamTransport,
    protocol: asyncio.BaseProtocol,
    ssl: SSLContext,
    server_hostname: str | None,
) -> asyncio.Transport:
    """Shake hands, and tell `protocol` that it is connected. The transport that it gets.

    As a server if `server_hostname` is None. The transport is aborted if this fails.

    Raises:
        OSError: the handshake failed (ssl.SSLError), or the peer went away.
    """
    loop = asyncio.get_running_loop()
    transport.set_protocol(_Silent())
    transport.pause_reading()
    transport.begin()
    try:
        secure = await loop.start_tls(
            transport,
            protocol,
            ssl,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
    except BaseException:
        transport.abort()
        raise
    assert secure is not None
    protocol.connection_made(secure)
    return secure
