"""Asyncio-native networking over RDMA.

An example::

    async with aiordma.connect("10.7.1.1", 7471) as connection:
        await connection.send(b"hello")
        print(await connection.recv())

This module exports the public API. The packages `aiordma.rdmacm` and `aiordma.verbs` are public
too: they bind librdmacm and libibverbs one to one.
"""

from aiordma.cm import AsyncCmId, SyncCmId
from aiordma.cm.handshakes import ListenerStats
from aiordma.cm.resolving import getaddrinfo
from aiordma.datagrams import (
    Datagram,
    DatagramOptions,
    DatagramPeer,
    DatagramRequest,
    MulticastGroup,
)
from aiordma.datagrams.datagram_endpoint import DatagramEndpoint, open_datagram
from aiordma.dispatch.device_watch import DeviceWatch, watch_devices
from aiordma.enums import AccessFlags, AsyncEventType, CmEventType, PortSpace, WcOpcode, WcStatus
from aiordma.errors import (
    AddressError,
    BusyError,
    ConnectError,
    ConnectionClosed,
    DeviceRemoved,
    LocalClosed,
    PeerClosed,
    PeerTimeout,
    ProtocolError,
    RdmaError,
    ReceiveOverrun,
    Rejected,
    RouteError,
    Unreachable,
    VerbsError,
    WorkRequestError,
)
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
from aiordma.memory.registration_cache import RegistrationCache
from aiordma.message_streams.connect import (
    MessageListener,
    MessageRequest,
    connect_messages,
    listen_messages,
)
from aiordma.message_streams.message_stream import MessageStream
from aiordma.message_streams.options import MessageOptions
from aiordma.message_streams.received import ReceivedMessage
from aiordma.message_streams.stats import MessageStreamStats
from aiordma.messages import MemoryWindow, Message
from aiordma.messages.connect import connect, listen
from aiordma.messages.connection import Connection
from aiordma.messages.listener import ConnectRequest, Listener
from aiordma.options import ConnectionOptions, ListenerLimits
from aiordma.qp import ConnectionStats
from aiordma.rdmacm import AddrInfo, CmEvent, EventChannel
from aiordma.streams import (
    ByteStream,
    StreamListener,
    StreamOptions,
    StreamRequest,
    StreamStats,
    connect_stream,
    listen_stream,
)

__version__ = "0.1.0"

__all__ = [
    "AccessFlags",
    "AddrInfo",
    "AddressError",
    "AsyncCmId",
    "AsyncEventType",
    "BusyError",
    "ByteStream",
    "CmEvent",
    "CmEventType",
    "ConnectError",
    "ConnectRequest",
    "Connection",
    "ConnectionClosed",
    "ConnectionOptions",
    "ConnectionStats",
    "Datagram",
    "DatagramEndpoint",
    "DatagramOptions",
    "DatagramPeer",
    "DatagramRequest",
    "DeviceRemoved",
    "DeviceWatch",
    "EventChannel",
    "Listener",
    "ListenerLimits",
    "ListenerStats",
    "LocalClosed",
    "MemoryRegion",
    "MemorySlice",
    "MemoryWindow",
    "Message",
    "MessageListener",
    "MessageOptions",
    "MessageRequest",
    "MessageStream",
    "MessageStreamStats",
    "MulticastGroup",
    "PeerClosed",
    "PeerTimeout",
    "PortSpace",
    "ProtocolError",
    "RdmaError",
    "ReceiveOverrun",
    "ReceivedMessage",
    "RegistrationCache",
    "Rejected",
    "RemoteBuffer",
    "RouteError",
    "StreamListener",
    "StreamOptions",
    "StreamRequest",
    "StreamStats",
    "SyncCmId",
    "Unreachable",
    "VerbsError",
    "WcOpcode",
    "WcStatus",
    "WorkRequestError",
    "connect",
    "connect_messages",
    "connect_stream",
    "getaddrinfo",
    "listen",
    "listen_messages",
    "listen_stream",
    "open_datagram",
    "watch_devices",
]
