"""open_connection(), start_server(), create_connection() and create_server()."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import TypeVar

from aiordma.asyncio.reader import StreamReader
from aiordma.asyncio.server import StreamServer
from aiordma.asyncio.tls import check_tls, start_tls
from aiordma.asyncio.transport import create_transport
from aiordma.options import DEFAULT_LIMITS, ListenerLimits
from aiordma.streams.listener import listen_stream_core
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.streams.stream_core import connect_stream_core

# The default of asyncio. The longest line that readline() takes is about twice as much.
LIMIT = 1 << 16

P = TypeVar("P", bound=asyncio.BaseProtocol)
OnConnected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


async def create_connection(
    protocol_factory: Callable[[], P],
    host: str,
    port: int,
    *,
    ssl: SSLContext | None = None,
    server_hostname: str | None = None,
    local_addr: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> tuple[asyncio.Transport, P]:
    """Connect like loop.create_connection(), over RDMA, to a peer that uses rsocket.

    Return the transport and the protocol.

    Cancelling leaves nothing behind.

    Raises:
        OSError: there is no RDMA device. A ConnectionError: no peer answers or accepts, or the peer
            does not use rsocket. An ssl.SSLError: TLS failed. See connect_stream().
        DeviceRemoved: the device was removed meanwhile.
        ValueError: `ssl` on an event loop that supports TLS on its own transports only (uvloop).
    """
    loop = asyncio.get_running_loop()
    check_tls(loop, ssl)
    core = await connect_stream_core(host, port, local_addr, options)
    transport, protocol = create_transport(core, loop, protocol_factory)
    if ssl is not None:
        name = host if server_hostname is None else server_hostname
        return await start_tls(transport, protocol, ssl, name), protocol
    transport.begin()
    return transport, protocol


async def create_server(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: str | None,
    port: int,
    *,
    backlog: int = 100,
    ssl: SSLContext | None = None,
    start_serving: bool = True,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> StreamServer:
    """Create a server like loop.create_server(), over RDMA, for peers that use rsocket.

    `host` is a name or address of this machine; None means all its addresses. Port 0 means a free
    port, which `server.sockets[0].getsockname()` returns.

    Cancelling leaves nothing behind.

    Raises: as listen_stream(), for example OSError if the port is in use; for `ssl`, as
    create_connection().
    """
    check_tls(asyncio.get_running_loop(), ssl)
    listener = await listen_stream_core(host, port, backlog, limits, options)
    server = StreamServer(listener, protocol_factory, ssl)
    if start_serving:
        await server.start_serving()
    return server


async def open_connection(
    host: str,
    port: int,
    *,
    limit: int = LIMIT,
    ssl: SSLContext | None = None,
    server_hostname: str | None = None,
    local_addr: tuple[str, int] | None = None,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect like asyncio.open_connection(), and return a StreamReader and a StreamWriter.

    `writer.get_extra_info()` has "peername", "sockname" and "rdma_device". `limit` is the limit in
    bytes of the reader's buffer, which also bounds the length of a line.

    Cancelling leaves nothing behind. Raises: as create_connection().
    """
    loop = asyncio.get_running_loop()
    reader = StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await create_connection(
        lambda: protocol,
        host,
        port,
        ssl=ssl,
        server_hostname=server_hostname,
        local_addr=local_addr,
        options=options,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def start_server(
    client_connected_cb: OnConnected,
    host: str | None,
    port: int,
    *,
    limit: int = LIMIT,
    backlog: int = 100,
    ssl: SSLContext | None = None,
    start_serving: bool = True,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> StreamServer:
    """Start a server like asyncio.start_server(), over RDMA.

    It calls `client_connected_cb(reader, writer)` for each peer.

    Cancelling leaves nothing behind. Raises: as create_server().
    """
    loop = asyncio.get_running_loop()

    def factory() -> asyncio.StreamReaderProtocol:
        reader = StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, client_connected_cb, loop=loop)

    return await create_server(
        factory,
        host,
        port,
        backlog=backlog,
        ssl=ssl,
        start_serving=start_serving,
        limits=limits,
        options=options,
    )
