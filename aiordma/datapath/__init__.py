"""The memory and the requests of one queue pair, in both directions."""

from aiordma.datapath.berth import RECEIVE, Berth, removal
from aiordma.datapath.gather import is_registered, joined
from aiordma.datapath.load import Load
from aiordma.datapath.message import Message
from aiordma.datapath.operation import Operation
from aiordma.datapath.owner import Owner
from aiordma.datapath.receive_ring import ReceiveRing
from aiordma.datapath.receiver import Receiver
from aiordma.datapath.remote_access import RemoteAccess
from aiordma.datapath.send_queue import NUMBER_MASK, SendQueue
from aiordma.datapath.shared_receives import SharedReceives
from aiordma.datapath.stats import ConnectionStats
from aiordma.datapath.traffic import Traffic
from aiordma.datapath.windows import MemoryWindow

__all__ = [
    "NUMBER_MASK",
    "RECEIVE",
    "Berth",
    "ConnectionStats",
    "Load",
    "MemoryWindow",
    "Message",
    "Operation",
    "Owner",
    "ReceiveRing",
    "Receiver",
    "RemoteAccess",
    "SendQueue",
    "SharedReceives",
    "Traffic",
    "is_registered",
    "joined",
    "removal",
]
