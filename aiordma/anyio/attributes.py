"""What streams and listeners tell about themselves through `extra()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from socket import AddressFamily
from typing import Any

from anyio import TypedAttributeSet, typed_attribute
from anyio.abc import SocketAttribute

from aiordma.messages.connection import Connection
from aiordma.streams import ByteStream

# anyio's own type for it: each key is typed as the value that its function returns.
Attributes = Mapping[Any, Callable[[], Any]]


class RdmaAttribute(TypedAttributeSet):
    """What there is to know of a stream, and `local_address` of a listener.

    As the properties of a Connection, or of a ByteStream, which has some of them; `connection` or
    `stream` is the thing itself.
    """

    #: `(host, port)` of this side
    local_address: tuple[str, int] = typed_attribute()
    #: `(host, port)` of the other side
    peer_address: tuple[str, int] = typed_attribute()
    #: what the peer sent along when it accepted, or when it asked to connect
    private_data: bytes = typed_attribute()
    #: the largest message in bytes
    max_message_size: int = typed_attribute()
    #: the RDMA device it runs on
    device_name: str = typed_attribute()
    #: for what a stream does not have: memory, one-sided operations, statistics
    connection: Connection = typed_attribute()
    #: likewise of an RdmaByteStream: its ByteStream
    stream: ByteStream = typed_attribute()


def of_connection(connection: Connection) -> Attributes:
    """Those of a stream: RDMA's, and those by which anyio's programs know a socket."""
    return {
        **of_local_address(connection.local_address),
        SocketAttribute.remote_address: lambda: connection.peer_address,
        SocketAttribute.remote_port: lambda: connection.peer_address[1],
        RdmaAttribute.peer_address: lambda: connection.peer_address,
        RdmaAttribute.private_data: lambda: connection.private_data,
        RdmaAttribute.max_message_size: lambda: connection.max_message_size,
        RdmaAttribute.device_name: lambda: connection.device_name,
        RdmaAttribute.connection: lambda: connection,
    }


def of_stream(stream: ByteStream) -> Attributes:
    """Those of a byte stream."""
    return {
        **of_local_address(stream.local_address),
        SocketAttribute.remote_address: lambda: stream.peer_address,
        SocketAttribute.remote_port: lambda: stream.peer_address[1],
        RdmaAttribute.peer_address: lambda: stream.peer_address,
        RdmaAttribute.device_name: lambda: stream.device_name,
        RdmaAttribute.stream: lambda: stream,
    }


def of_local_address(address: tuple[str, int]) -> Attributes:
    """Those of whatever has an address here."""
    return {
        SocketAttribute.family: lambda: _family(address[0]),
        SocketAttribute.local_address: lambda: address,
        SocketAttribute.local_port: lambda: address[1],
        RdmaAttribute.local_address: lambda: address,
    }


def _family(host: str) -> AddressFamily:
    return AddressFamily.AF_INET6 if ":" in host else AddressFamily.AF_INET
