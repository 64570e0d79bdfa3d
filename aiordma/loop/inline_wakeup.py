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
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from aiordma.loop.protocol import Loop, LoopFuture


Ts = TypeVarTuple("Ts")


class _InlineBatch(threading.local):
    """The batch of tasks woken by one callback; one per thread, and so one per running loop."""

    futures: deque[InlineFuture] | None = None
    """Futures that the callback has set so far, or None while no such callback is running."""
    callbacks: dict[Callable[[], None], None] | None = None
    """Functions called after the batch, or None if fewer than two tasks run in it."""
    scheduled: int = 0
    """The number of tasks and callbacks that were left to the loop's next iteration."""


_batch = _InlineBatch()


class InlineFuture(asyncio.Future[None]):
    """A future that wakes one task of an asyncio loop, inline where possible."""

    __slots__ = ("_context_of_waiter", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiter: Callable[[InlineFuture], object] | None = None
        self._context_of_waiter: Context | None = None

    def add_done_callback(
        self, fn: Callable[[InlineFuture], object], /, *, context: Context | None = None
    ) -> None:
        """Add a callback. The first one with a context resumes the task that awaits the future."""
        if self._waiter is None and context is not None and not self.done():
            self._waiter, self._context_of_waiter = fn, context
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[InlineFuture], object], /) -> int:
        """Remove a callback. The waiting task does so if something else resumes it."""
        if self._waiter == fn:
            self._waiter = None
            return 1
        return super().remove_done_callback(fn)

    def set_result(self, result: None, /) -> None:
        """Wake the task: at the end of run_with_inline_wakeups(), or else in the next iteration."""
        super().set_result(None)
        if self._waiter is not None:
            futures = _batch.futures
            if futures is None:
                self.wake_later()
            else:
                futures.append(self)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future. The task is resumed in the next iteration of the loop."""
        if not super().cancel(msg):
            return False
        self.wake_later()
        return True

    def wake_now(self) -> None:
        """Run the task's next step in its context, as the loop would."""
        waiter, context = self._waiter, self._context_of_waiter
        self._waiter = self._context_of_waiter = None
        if waiter is not None and context is not None:
            context.run(waiter, self)

    def wake_later(self) -> None:
        """Have the loop run the task's next step in its next iteration."""
        waiter, context = self._waiter, self._context_of_waiter
        self._waiter = self._context_of_waiter = None
        if waiter is not None:
            _batch.scheduled += 1
            self.get_loop().call_soon(waiter, self, context=context)


def make_future(loop: Loop) -> LoopFuture:
    """Return a future for one waiting task: an InlineFuture on asyncio, else one of the loop."""
    return (
        InlineFuture(loop) if isinstance(loop, asyncio.AbstractEventLoop) else loop.create_future()
    )


def future_factory(loop: Loop) -> Callable[[], LoopFuture]:
    """Return a function that does make_future(loop), for callers that make many futures."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return partial(InlineFuture, loop)
    return loop.create_future


def run_with_inline_wakeups(callback: Callable[[*Ts], object], *arguments: *Ts) -> None:
    """Call `callback`, then run the tasks that it woke.

    Use it only where the loop itself is the caller, never inside a task.

    Raises:
        BaseException: raised by `callback`, or by a task and ending the loop with it, such as
            KeyboardInterrupt.
    """
    if _batch.futures is not None:
        callback(*arguments)
        return
    futures: deque[InlineFuture] = deque()
    _batch.futures = futures
    try:
        callback(*arguments)
    finally:
        _batch.futures = None
        if futures:
            _run_batch(futures)


def scheduled_count() -> int:
    """Return the number of wake-ups that this thread has left to the loop's next iteration.

    It only grows. A task that polls compares it, to notice that other tasks have work to do.
    """
    return _batch.scheduled


def count_scheduled() -> None:
    """Count a callback that a completion has scheduled for the loop's next iteration."""
    _batch.scheduled += 1


def after_batch(callback: Callable[[], None]) -> bool:
    """Have `callback` called once, after all tasks that were woken in the same batch have run.

    Return False, and do not call it, if no batch is running or if the batch is one task only.
    """
    if _batch.callbacks is None:
        return False
    _batch.callbacks.setdefault(callback)
    return True


def _run_batch(futures: deque[InlineFuture]) -> None:
    if len(futures) == 1:
        futures.popleft().wake_now()
        return
    callbacks: dict[Callable[[], None], None] = {}
    _batch.callbacks = callbacks
    try:
        while futures:
            futures.popleft().wake_now()
    finally:
        _batch.callbacks = None
        for future in futures:  # a task has ended the loop: if it runs again, it runs the others
            future.wake_later()
        _call_all(callbacks)


def _call_all(callbacks: dict[Callable[[], None], None]) -> None:
    """Call and remove all `callbacks`, also if some of them raise."""
    try:
        while callbacks:
            callbacks.popitem()[0]()
    finally:
        if callbacks:
            _call_all(callbacks)
