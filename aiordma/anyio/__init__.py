"""aiordma in anyio's manners: for programs that run on asyncio and on trio alike.

    async with aiordma.anyio.connect("10.7.1.1", 7471) as stream:
        await stream.send(b"hello")
        print(await stream.receive())

Connections are anyio's object streams, those of connect_stream() its byte streams, listeners are
its listeners, and what they raise in use is anyio's. It needs anyio: `pip install aiordma[anyio]`.
"""

from aiordma.anyio.attributes import RdmaAttribute
from aiordma.anyio.byte_streams import (
    RdmaByteListener,
    RdmaByteStream,
    connect_stream,
    listen_stream,
)
from aiordma.anyio.messages import MessageListener, MessageStream, connect, listen

__all__ = [
    "MessageListener",
    "MessageStream",
    "RdmaAttribute",
    "RdmaByteListener",
    "RdmaByteStream",
    "connect",
    "connect_stream",
    "listen",
    "listen_stream",
]
