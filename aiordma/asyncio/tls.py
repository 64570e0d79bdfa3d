"""TLS on a StreamTransport, by loop.start_tls()."""

from __future__ import annotations

import asyncio
from ssl import SSLContext

from aiordma.asyncio.transport import StreamTransport

TLS_NOT_SUPPORTED = (
    "this event loop (for example uvloop) supports TLS on its own transports only: use the event "
    "loop of asyncio, or the byte streams of aiordma.anyio with anyio's TLSStream"
)


def check_tls(loop: asyncio.AbstractEventLoop, ssl: SSLContext | None) -> None:
    """Check that `ssl` can be used on this event loop. None, which means no TLS, always can.

    Raises:
        ValueError: the event loop does not support TLS on a StreamTransport.
        TypeError: `ssl` is not an SSLContext.
    """
    if ssl is None:
        return
    if not isinstance(ssl, SSLContext):
        raise TypeError(f"ssl is {ssl!r}, not an SSLContext: see ssl.create_default_context()")
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise ValueError(TLS_NOT_SUPPORTED)


class _HandshakeProtocol(asyncio.Protocol):
    """The protocol of the transport until the TLS handshake. It ignores all events."""


async def start_tls(
    transport: StreamTransport,
    protocol: asyncio.BaseProtocol,
    ssl: SSLContext,
    server_hostname: str | None,
) -> asyncio.Transport:
    """Make the TLS handshake, connect `protocol`, and return the TLS transport.

    This side is the server if `server_hostname` is None. The transport is aborted if this fails.

    Raises:
        OSError: the handshake failed (ssl.SSLError), or the peer ended the connection.
    """
    loop = asyncio.get_running_loop()
    transport.set_protocol(_HandshakeProtocol())
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
