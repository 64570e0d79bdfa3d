"""A connected queue pair: its endpoint, its send queue, its receives and its memory in flight."""

from aiordma.qp.data_path import DataPath, EndpointCallbacks
from aiordma.qp.endpoint import Endpoint
from aiordma.qp.operation import WC_OPCODE_OF, Operation, Operations
from aiordma.qp.post_list import MemoryRequest, PostList
from aiordma.qp.receive_ring import RECEIVE, ReceiveRing
from aiordma.qp.resources import QueuePairResources
from aiordma.qp.scatter_gather import (
    ScatterGatherBuilder,
    ScatterGatherList,
    check_fits,
    is_region,
    is_registered,
    join_buffers,
)
from aiordma.qp.send_queue import NUMBER_MASK, InFlightMemory, Post, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.qp.stats import ConnectionStats

__all__ = [
    "NUMBER_MASK",
    "RECEIVE",
    "WC_OPCODE_OF",
    "ConnectionStats",
    "DataPath",
    "Endpoint",
    "EndpointCallbacks",
    "InFlightMemory",
    "MemoryRequest",
    "Operation",
    "Operations",
    "Post",
    "PostList",
    "QueuePairResources",
    "ReceiveRing",
    "ScatterGatherBuilder",
    "ScatterGatherList",
    "SendQueue",
    "SharedReceives",
    "check_fits",
    "is_region",
    "is_registered",
    "join_buffers",
]
