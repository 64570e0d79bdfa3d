"""Inline wake-ups: run a task in the callback that wakes it, not in the loop's next iteration.

An asyncio future has the loop call its task in the next iteration, which costs a system call and
some dozen Python frames. In aiordma, tasks are mostly woken by a callback of the loop itself, for a
readable file descriptor. Such a callback has nothing else to do afterwards. So
run_with_inline_wakeups() calls the callback and then runs the tasks that it woke, just as the loop
would. A task that is woken anywhere else, for instance by another task, waits for the loop's next
iteration.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from aiordma._native import fast_path

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop, LoopFuture


InlineFuture = fast_path.InlineFuture
"""A future that wakes one task of an asyncio loop, inline where possible."""

run_with_inline_wakeups = fast_path.run_with_inline_wakeups
"""Call a callback with arguments, then run the tasks that it woke.

Use it only where the loop itself is the caller, never inside a task. It raises what the callback
raises, or else what a task raises that ends the loop with it, such as KeyboardInterrupt.
"""

scheduled_count = fast_path.scheduled_count
"""Return the number of wake-ups that this thread has left to the loop's next iteration.

It only grows. A task that polls compares it, to notice that other tasks have work to do.
"""


class _Batch(threading.local):
    """The batch of tasks that runs now; one per thread, and so one per running loop."""

    callbacks: dict[Callable[[], None], None] | None = None
    """Functions called after the batch, or None if fewer than two tasks run in it."""


_batch = _Batch()


make_future = fast_path.make_future
"""Return a future for one waiting task of `loop`: an InlineFuture on asyncio, else one of the loop.
"""


def future_factory(loop: Loop) -> Callable[[], LoopFuture]:
    """Return a function that does make_future(loop), for callers that make many futures."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return fast_path.InlineFutureFactory(loop)
    return loop.create_future


def after_batch(callback: Callable[[], None]) -> bool:
    """Have `callback` called once, after all tasks that were woken in the same batch have run.

    Return False, and do not call it, if no batch is running or if the batch is one task only.
    """
    if _batch.callbacks is None:
        return False
    _batch.callbacks.setdefault(callback)
    return True


def _run_batch(futures: list[fast_path.InlineFuture]) -> None:
    """Run several tasks that were woken in the same batch. C runs a single one."""
    callbacks: dict[Callable[[], None], None] = {}
    _batch.callbacks = callbacks
    try:
        # If a task ends the loop and it runs again, it runs the remaining ones.
        fast_path.wake_batch(futures)
    finally:
        _batch.callbacks = None
        _call_all(callbacks)


def _call_all(callbacks: dict[Callable[[], None], None]) -> None:
    """Call and remove all `callbacks`, also if some of them raise."""
    try:
        while callbacks:
            callbacks.popitem()[0]()
    finally:
        if callbacks:
            _call_all(callbacks)


class _NoLoop:
    """The loop of a future that needs none."""

    def get_debug(self) -> bool:
        return False


def _make_done_future() -> asyncio.Future[None]:
    """Return a future of asyncio that is done."""
    done = asyncio.Future[None](loop=cast(asyncio.AbstractEventLoop, _NoLoop()))
    done.set_result(None)
    return done


fast_path.set_run_batch(_run_batch)
fast_path.set_done_future(_make_done_future())
