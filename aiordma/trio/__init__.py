"""Byte streams over RDMA for trio: half-closeable streams and listeners.

    stream = await aiordma.trio.connect_stream("10.7.1.1", 7471)

The rest of aiordma (connections, datagrams, ids) runs on trio without an adapter. This package
needs trio: `pip install aiordma[trio]`.
"""

from aiordma.trio.listener import RdmaListener, listen_stream
from aiordma.trio.stream import RdmaStream, connect_stream

__all__ = ["RdmaListener", "RdmaStream", "connect_stream", "listen_stream"]
