"""Readers of file descriptors: cm events go to their ids, completions to their owners."""

from aiordma.dispatch.cm_events import CmDispatcher, destroy_quietly
from aiordma.dispatch.loop_device import (
    KEY_SHIFT,
    CompletionSink,
    LoopDevice,
    SharedQueue,
)

__all__ = [
    "KEY_SHIFT",
    "CmDispatcher",
    "CompletionSink",
    "LoopDevice",
    "SharedQueue",
    "destroy_quietly",
]
