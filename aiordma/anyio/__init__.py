"""Adapters of aiordma for anyio, for programs that run on both asyncio and trio.

    async with aiordma.anyio.connect("10.7.1.1", 7471) as stream:
        await stream.send(b"hello")
        print(await stream.receive())

connect() and connect_messages() return anyio object streams, and connect_stream() an anyio byte
stream. listen(), listen_messages() and listen_stream() return anyio listeners. In use, streams and
listeners raise the exceptions of anyio.
This package needs anyio: `pip install aiordma[anyio]`.
"""

from aiordma.anyio.attributes import RdmaAttribute
from aiordma.anyio.byte_streams import (
    RdmaByteListener,
    RdmaByteStream,
    connect_stream,
    listen_stream,
)
from aiordma.anyio.message_streams import (
    RdmaMessageListener,
    RdmaMessageStream,
    connect_messages,
    listen_messages,
)
from aiordma.anyio.messages import RdmaConnection, RdmaListener, connect, listen

__all__ = [
    "RdmaAttribute",
    "RdmaByteListener",
    "RdmaByteStream",
    "RdmaConnection",
    "RdmaListener",
    "RdmaMessageListener",
    "RdmaMessageStream",
    "connect",
    "connect_messages",
    "connect_stream",
    "listen",
    "listen_messages",
    "listen_stream",
]
