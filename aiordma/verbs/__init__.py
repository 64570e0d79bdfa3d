"""libibverbs: a class for each of its objects, as in its man pages. Uses no event loop."""

from aiordma.verbs.address_handle import AddressHandle, AddressHandleAttributes, LinkHeader
from aiordma.verbs.completion import Completion, CompletionChannel, CompletionQueue
from aiordma.verbs.device import AsyncEvent, Device, DeviceAttributes, PortAttributes
from aiordma.verbs.memory_window import MemoryWindow
from aiordma.verbs.protection_domain import ProtectionDomain
from aiordma.verbs.queue_pair import QueuePair
from aiordma.verbs.queue_pair_init import (
    PackedQueuePairInit,
    QueuePairAttributes,
    QueuePairCaps,
    QueuePairInit,
)
from aiordma.verbs.registration import Registration
from aiordma.verbs.request_chain import RequestChain
from aiordma.verbs.shared_receive_queue import SharedReceiveQueue, SharedReceiveQueueCaps

__all__ = [
    "AddressHandle",
    "AddressHandleAttributes",
    "AsyncEvent",
    "Completion",
    "CompletionChannel",
    "CompletionQueue",
    "Device",
    "DeviceAttributes",
    "LinkHeader",
    "MemoryWindow",
    "PackedQueuePairInit",
    "PortAttributes",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAttributes",
    "QueuePairCaps",
    "QueuePairInit",
    "Registration",
    "RequestChain",
    "SharedReceiveQueue",
    "SharedReceiveQueueCaps",
]
