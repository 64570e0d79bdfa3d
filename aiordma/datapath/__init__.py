"""The memory and the requests of one queue pair, in both directions."""

from aiordma.datapath.berth import RECEIVE, Berth, removal
from aiordma.datapath.receive_ring import ReceiveRing
from aiordma.datapath.send_queue import NUMBER_MASK, SendQueue

__all__ = ["NUMBER_MASK", "RECEIVE", "Berth", "ReceiveRing", "SendQueue", "removal"]
