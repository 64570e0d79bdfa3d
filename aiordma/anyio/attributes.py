"""The attributes of streams and listeners, which `extra()` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from socket import AddressFamily
from typing import Any

from anyio import TypedAttributeSet, typed_attribute
from anyio.abc import SocketAttribute

from aiordma.message_streams.message_stream import MessageStream
from aiordma.messages.connection import Connection
from aiordma.streams import ByteStream

# The type that anyio uses: each key has the type of the value that its function returns.
Attributes = Mapping[Any, Callable[[], Any]]


class RdmaAttribute(TypedAttributeSet):
    """The attributes of a stream. A listener has only `local_address`.

    Their values are those of the properties of a Connection, a MessageStream or a ByteStream. The
    streams have only some of them. `connection`, `message_stream` or `stream` is the object itself.
    """

    #: `(host, port)` of this side
    local_address: tuple[str, int] = typed_attribute()
    #: `(host, port)` of the peer
    peer_address: tuple[str, int] = typed_attribute()
    #: the private data that the peer sent when it connected or accepted
    private_data: bytes = typed_attribute()
    #: the size of the largest message in bytes
    max_message_size: int = typed_attribute()
    #: the name of the RDMA device
    device_name: str = typed_attribute()
    #: the Connection of an RdmaConnection, for memory, one-sided operations and statistics
    connection: Connection = typed_attribute()
    #: the MessageStream of an RdmaMessageStream, for receiving without a copy
    message_stream: MessageStream = typed_attribute()
    #: the ByteStream of an RdmaByteStream
    stream: ByteStream = typed_attribute()


def connection_attributes(connection: Connection) -> Attributes:
    """Return the attributes of a connection: those of RdmaAttribute and SocketAttribute."""
    return {
        **_connected_attributes(connection),
        RdmaAttribute.private_data: lambda: connection.private_data,
        RdmaAttribute.max_message_size: lambda: connection.max_message_size,
        RdmaAttribute.connection: lambda: connection,
    }


def message_stream_attributes(stream: MessageStream) -> Attributes:
    """Return the attributes of a message stream."""
    return {
        **_connected_attributes(stream),
        RdmaAttribute.private_data: lambda: stream.private_data,
        RdmaAttribute.message_stream: lambda: stream,
    }


def stream_attributes(stream: ByteStream) -> Attributes:
    """Return the attributes of a byte stream."""
    return {**_connected_attributes(stream), RdmaAttribute.stream: lambda: stream}


def _connected_attributes(stream: Connection | MessageStream | ByteStream) -> Attributes:
    """Return the attributes of all that is connected to a peer."""
    return {
        **address_attributes(stream.local_address),
        SocketAttribute.remote_address: lambda: stream.peer_address,
        SocketAttribute.remote_port: lambda: stream.peer_address[1],
        RdmaAttribute.peer_address: lambda: stream.peer_address,
        RdmaAttribute.device_name: lambda: stream.device_name,
    }


def address_attributes(address: tuple[str, int]) -> Attributes:
    """Return the attributes for a local address."""
    return {
        SocketAttribute.family: lambda: _family(address[0]),
        SocketAttribute.local_address: lambda: address,
        SocketAttribute.local_port: lambda: address[1],
        RdmaAttribute.local_address: lambda: address,
    }


def _family(host: str) -> AddressFamily:
    return AddressFamily.AF_INET6 if ":" in host else AddressFamily.AF_INET
