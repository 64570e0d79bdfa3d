"""libibverbs, one class a noun, faithful to its man pages. Nothing here touches an event loop."""

from aiordma.verbs.completion import CompletionChannel, CompletionQueue
from aiordma.verbs.device import Device, DeviceAttributes
from aiordma.verbs.protection_domain import ProtectionDomain, Registration
from aiordma.verbs.queue_pair import QueuePair, QueuePairCaps

__all__ = [
    "CompletionChannel",
    "CompletionQueue",
    "Device",
    "DeviceAttributes",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairCaps",
    "Registration",
]
