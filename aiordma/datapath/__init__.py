"""The memory and the requests of one queue pair, in both directions."""

from aiordma.datapath.berth import RECEIVE, Berth, removal
from aiordma.datapath.operation import Operation
from aiordma.datapath.receive_ring import ReceiveRing
from aiordma.datapath.remote_access import RemoteAccess
from aiordma.datapath.send_queue import NUMBER_MASK, SendQueue

__all__ = [
    "NUMBER_MASK",
    "RECEIVE",
    "Berth",
    "Operation",
    "ReceiveRing",
    "RemoteAccess",
    "SendQueue",
    "removal",
]
