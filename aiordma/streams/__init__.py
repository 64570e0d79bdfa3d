"""Byte streams over RDMA in the protocol of rsocket(7), the sockets of librdmacm."""

from aiordma.streams.listener import StreamListener, StreamRequest, listen_stream
from aiordma.streams.options import StreamOptions
from aiordma.streams.stats import StreamStats
from aiordma.streams.stream import ByteStream, connect_stream

__all__ = [
    "ByteStream",
    "StreamListener",
    "StreamOptions",
    "StreamRequest",
    "StreamStats",
    "connect_stream",
    "listen_stream",
]
