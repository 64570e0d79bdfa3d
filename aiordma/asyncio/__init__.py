"""asyncio's streams, transports and servers over RDMA, in the language of rsocket(7).

A service moves from TCP to RDMA by where it takes these functions from:

    from aiordma.asyncio import open_connection, start_server
"""

from aiordma.asyncio.connections import (
    create_connection,
    create_server,
    open_connection,
    start_server,
)
from aiordma.asyncio.server import StreamServer
from aiordma.asyncio.transport import StreamTransport
from aiordma.streams.options import StreamOptions

__all__ = [
    "StreamOptions",
    "StreamServer",
    "StreamTransport",
    "create_connection",
    "create_server",
    "open_connection",
    "start_server",
]
