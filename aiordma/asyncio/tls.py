"""TLS on a StreamTransport, by loop.start_tls()."""

from __future__ import annotations

import asyncio
from ssl import SSLContext
from typing import Any

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


class _HoldingProtocol(asyncio.Protocol):
    """The protocol above TLS until the user's has a transport. It holds what the peer sends.

    The first data can arrive together with the end of the handshake, before a task can run.
    """

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._has_finished = False
        self._lost: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> None:
        self._has_finished = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.append(exc)

    def pass_on(self, protocol: Any) -> None:
        """Pass to `protocol` what has arrived."""
        for data in self._data:
            if isinstance(protocol, asyncio.BufferedProtocol):
                _copy_to(protocol, memoryview(data))
            else:
                protocol.data_received(data)
        if self._has_finished:
            protocol.eof_received()
        for error in self._lost:
            protocol.connection_lost(error)


def _copy_to(protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
    while data:
        with memoryview(protocol.get_buffer(len(data))) as buffer:
            nbytes = min(len(buffer), len(data))
            if not nbytes:
                raise RuntimeError("get_buffer() returned an empty buffer")
            buffer[:nbytes] = data[:nbytes]
        protocol.buffer_updated(nbytes)
        data = data[nbytes:]


async def start_tls(
    transport: StreamTransport,
    protocol: asyncio.BaseProtocol,
    ssl: SSLContext,
    server_hostname: str | None,
) -> asyncio.Transport:
    """Make the TLS handshake, connect `protocol`, and return the TLS transport.

    This side is the server if `server_hostname` is None. The transport is aborted if this fails.

    Raises:
        OSError: the handshake failed (ssl.SSLError), or the connection was ended.
        Others: what `protocol` raises.
    """
    loop = asyncio.get_running_loop()
    transport.set_protocol(_HandshakeProtocol())
    transport.pause_reading()
    transport.begin()
    held = _HoldingProtocol()
    try:
        secure = await loop.start_tls(
            transport,
            held,
            ssl,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        if secure is None:
            raise ConnectionAbortedError("the connection was closed during the TLS handshake")
        secure.set_protocol(protocol)
        protocol.connection_made(secure)
        held.pass_on(protocol)
    except BaseException:
        transport.abort()
        raise
    return secure
