"""The few things the core needs of an event loop, and what is built on just those."""

from aiordma.loop.checkpoints import (
    Checkpoint,
    cancellation_of,
    checkpoint,
    checkpoint_if_cancelled,
    checkpoint_of,
)
from aiordma.loop.current import running_loop
from aiordma.loop.forked import is_forked_child, refuse_forked_child
from aiordma.loop.inline_wakeup import after_all, future_of, futures_of, promptly
from aiordma.loop.interrupt import Interrupt
from aiordma.loop.protocol import Loop, LoopFuture, LoopTimer
from aiordma.loop.task_groups import task_group
from aiordma.loop.threadsafe_call import hand_over
from aiordma.loop.time_budget import Turn
from aiordma.loop.waiting import Deadline, Slots, WaitQueue, wake
from aiordma.loop.workers import (
    SerialJobs,
    make_in_worker,
    parking,
    post,
    run_in_worker,
    workers,
)

__all__ = [
    "Checkpoint",
    "Deadline",
    "Interrupt",
    "Loop",
    "LoopFuture",
    "LoopTimer",
    "SerialJobs",
    "Slots",
    "Turn",
    "WaitQueue",
    "after_all",
    "cancellation_of",
    "checkpoint",
    "checkpoint_if_cancelled",
    "checkpoint_of",
    "future_of",
    "futures_of",
    "hand_over",
    "is_forked_child",
    "make_in_worker",
    "parking",
    "post",
    "promptly",
    "refuse_forked_child",
    "run_in_worker",
    "running_loop",
    "task_group",
    "wake",
    "workers",
]
