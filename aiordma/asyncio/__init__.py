"""asyncio streams, transports and servers over RDMA, in the protocol of rsocket(7).

To move a service from TCP to RDMA, import these functions from here:

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
