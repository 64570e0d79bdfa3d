"""Datagrams: unconnected (UD) queue pairs, their peers and their multicast groups."""

from aiordma.datagrams.datagram_queue_pair import DatagramQueuePair
from aiordma.datagrams.datagram_receive_ring import Datagram
from aiordma.datagrams.multicast_groups import MulticastGroup
from aiordma.datagrams.options import DatagramOptions
from aiordma.datagrams.peer import DatagramPeer
from aiordma.datagrams.sidr import DatagramRequest

__all__ = [
    "Datagram",
    "DatagramOptions",
    "DatagramPeer",
    "DatagramQueuePair",
    "DatagramRequest",
    "MulticastGroup",
]
