"""Byte streams over RDMA in the language of rsocket(7), librdmacm's own sockets."""

from aiordma.streams.connect import connect_stream, listen_stream
from aiordma.streams.listener import StreamListener, StreamRequest
from aiordma.streams.options import StreamOptions
from aiordma.streams.stream import ByteStream

__all__ = [
    "ByteStream",
    "StreamListener",
    "StreamOptions",
    "StreamRequest",
    "connect_stream",
    "listen_stream",
]
