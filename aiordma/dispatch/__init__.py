"""Readers of events: rdma_cm events for ids, completions for queue pairs, events of devices."""

from aiordma.dispatch.adaptive_polling import AdaptivePolling, AdaptiveWait
from aiordma.dispatch.busy_poll import BusyPoll
from aiordma.dispatch.call_reader import CallReader
from aiordma.dispatch.cm_events import CmDispatcher, destroy_and_log, initialise
from aiordma.dispatch.completion_reader import KEY_SHIFT, CompletionHandler
from aiordma.dispatch.device_events import DeviceSubscription
from aiordma.dispatch.loop_device import LoopDevice
from aiordma.dispatch.memory_domain import MemoryDomain, OwnDomain
from aiordma.dispatch.queue_pair_events import failure_of
from aiordma.dispatch.shared_completion_queue import SharedCompletionQueue

__all__ = [
    "KEY_SHIFT",
    "AdaptivePolling",
    "AdaptiveWait",
    "BusyPoll",
    "CallReader",
    "CmDispatcher",
    "CompletionHandler",
    "DeviceSubscription",
    "LoopDevice",
    "MemoryDomain",
    "OwnDomain",
    "SharedCompletionQueue",
    "destroy_and_log",
    "failure_of",
    "initialise",
]
