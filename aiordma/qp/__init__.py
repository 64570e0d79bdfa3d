"""One queue pair at work: its beginning and end, its send queue, its receives, memory in flight."""

from aiordma.qp.data_path import Load, Owner
from aiordma.qp.endpoint import Endpoint
from aiordma.qp.operation import COMPLETION_OF, Operation, Operations
from aiordma.qp.post_list import ListRequest, Together
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.resources import RECEIVE, Berth, removal
from aiordma.qp.scatter_gather import (
    Gathered,
    Gatherer,
    check_fits,
    is_one,
    is_registered,
    joined,
)
from aiordma.qp.send_queue import NUMBER_MASK, Lent, Post, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.qp.stats import ConnectionStats

__all__ = [
    "COMPLETION_OF",
    "NUMBER_MASK",
    "RECEIVE",
    "Berth",
    "ConnectionStats",
    "Endpoint",
    "Gathered",
    "Gatherer",
    "Lent",
    "ListRequest",
    "Load",
    "Operation",
    "Operations",
    "Owner",
    "Post",
    "ReceiveRing",
    "SendQueue",
    "SharedReceives",
    "Together",
    "check_fits",
    "is_one",
    "is_registered",
    "joined",
    "removal",
]
