"""Byte streams over RDMA in trio's manners: its half-closeable streams and its listeners.

    stream = await aiordma.trio.connect_stream("10.7.1.1", 7471)

All else of aiordma runs under trio as it is: connections, datagrams, ids. It needs trio:
`pip install aiordma[trio]`.
"""

from aiordma.trio.listener import RdmaListener, listen_stream
from aiordma.trio.stream import RdmaStream, connect_stream

__all__ = ["RdmaListener", "RdmaStream", "connect_stream", "listen_stream"]
