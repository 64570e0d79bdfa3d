"""The event-loop methods that the core needs, and the tools built on them."""

from aiordma.loop.call_each import call_each
from aiordma.loop.checkpoints import (
    Checkpoint,
    cancellation_of,
    checkpoint,
    checkpoint_halves_of,
    checkpoint_if_cancelled,
    checkpoint_of,
    schedule_point_of,
    yield_of,
)
from aiordma.loop.current import running_loop
from aiordma.loop.deadline import Deadline
from aiordma.loop.forked import is_forked_child, note_use, refuse_forked_child
from aiordma.loop.inline_wakeup import (
    InlineFuture,
    after_batch,
    future_factory,
    make_future,
    run_with_inline_wakeups,
    scheduled_count,
)
from aiordma.loop.interrupt import Interrupt
from aiordma.loop.protocol import Loop, LoopFuture, LoopTimer
from aiordma.loop.serial_jobs import SerialJobs
from aiordma.loop.task_groups import run_in_background, task_group
from aiordma.loop.threadsafe_call import ensure_called, watch_closed_loop
from aiordma.loop.time_budget import LoopTimeBudget
from aiordma.loop.waiting import FairSemaphore, WaitQueue, wake
from aiordma.loop.workers import (
    WorkerPool,
    blocking_pool,
    call_threadsafe,
    make_in_worker,
    run_in_worker,
    worker_pool,
)

__all__ = [
    "Checkpoint",
    "Deadline",
    "FairSemaphore",
    "InlineFuture",
    "Interrupt",
    "Loop",
    "LoopFuture",
    "LoopTimeBudget",
    "LoopTimer",
    "SerialJobs",
    "WaitQueue",
    "WorkerPool",
    "after_batch",
    "blocking_pool",
    "call_each",
    "call_threadsafe",
    "cancellation_of",
    "checkpoint",
    "checkpoint_halves_of",
    "checkpoint_if_cancelled",
    "checkpoint_of",
    "ensure_called",
    "future_factory",
    "is_forked_child",
    "make_future",
    "make_in_worker",
    "note_use",
    "refuse_forked_child",
    "run_in_background",
    "run_in_worker",
    "run_with_inline_wakeups",
    "running_loop",
    "schedule_point_of",
    "scheduled_count",
    "task_group",
    "wake",
    "watch_closed_loop",
    "worker_pool",
    "yield_of",
]
