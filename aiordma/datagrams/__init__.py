"""Datagrams: a queue pair that sends to anybody, its peers and its multicast groups."""

from aiordma.datagrams.engine import DatagramEngine
from aiordma.datagrams.groups import MulticastGroup
from aiordma.datagrams.inbox import Datagram
from aiordma.datagrams.options import DatagramOptions
from aiordma.datagrams.peer import DatagramPeer
from aiordma.datagrams.requests import DatagramRequest

__all__ = [
    "Datagram",
    "DatagramEngine",
    "DatagramOptions",
    "DatagramPeer",
    "DatagramRequest",
    "MulticastGroup",
]
