"""Waking tasks in the callback that brings the news, rather than a turn of the loop later.

asyncio's futures have the loop call their task in its next turn, which costs a system call and some
dozen Python frames before the task goes on. What wakes tasks here is mostly a callback of the loop
itself, that of a readable descriptor, which has nothing else to do afterwards: promptly() runs such
a callback, and then the tasks that it woke, just as the loop would have. A task that is woken
anywhere else, by another task for instance, waits for the loop as ever.
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
    """Per thread, and so per running loop: whom a callback has woken so far."""

    futures: deque[InlineFuture] | None = None
    """None: no such callback is running."""
    callbacks: dict[Callable[[], None], None] | None = None
    """What is to be done when the tasks that it woke have had their go. None: it woke only one."""


_batch = _InlineBatch()


class InlineFuture(asyncio.Future[None]):
    """A wake-up for one task of an asyncio loop."""

    __slots__ = ("_context_of_waiter", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiter: Callable[[InlineFuture], object] | None = None
        self._context_of_waiter: Context | None = None

    def add_done_callback(
        self, fn: Callable[[InlineFuture], object], /, *, context: Context | None = None
    ) -> None:
        """What the task that awaits this calls, with how to go on."""
        if self._waiter is None and context is not None and not self.done():
            self._waiter, self._context_of_waiter = fn, context
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[InlineFuture], object], /) -> int:
        """Likewise when it goes on for another reason."""
        if self._waiter == fn:
            self._waiter = None
            return 1
        return super().remove_done_callback(fn)

    def set_result(self, result: None, /) -> None:
        """Wake the task: at the end of the callback that does it, or else in the next turn."""
        super().set_result(None)
        if self._waiter is not None:
            futures = _batch.futures
            if futures is None:
                self.wake_later()
            else:
                futures.append(self)

    def cancel(self, msg: Any | None = None) -> bool:
        """The task is cancelled: it hears of that in the next turn."""
        if not super().cancel(msg):
            return False
        self.wake_later()
        return True

    def wake_now(self) -> None:
        """Run the task, as the loop would."""
        waiter, context = self._waiter, self._context_of_waiter
        self._waiter = self._context_of_waiter = None
        if waiter is not None and context is not None:
            context.run(waiter, self)

    def wake_later(self) -> None:
        """Have the loop run it."""
        waiter, context = self._waiter, self._context_of_waiter
        self._waiter = self._context_of_waiter = None
        if waiter is not None:
            self.get_loop().call_soon(waiter, self, context=context)


def make_future(loop: Loop) -> LoopFuture:
    """A wake-up for one waiting task, prompt where the loop can have that."""
    return (
        InlineFuture(loop) if isinstance(loop, asyncio.AbstractEventLoop) else loop.create_future()
    )


def future_factory(loop: Loop) -> Callable[[], LoopFuture]:
    """What makes them, for those who need many: see future_of()."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return partial(InlineFuture, loop)
    return loop.create_future


def run_with_inline_wakeups(callback: Callable[[*Ts], object], *arguments: *Ts) -> None:
    """Call it, and then run the tasks that it has woken. Only for what the loop itself calls.

    Raises:
        BaseException: what ends a task and the loop with it, such as KeyboardInterrupt.
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
            _run(futures)


def after_batch(callback: Callable[[], None]) -> bool:
    """Have `callback` called, once, when all tasks that were woken together have had their go.

    False, and nothing is called, unless this is such a task, and others were woken with it.
    """
    if _batch.callbacks is None:
        return False
    _batch.callbacks.setdefault(callback)
    return True


def _run(futures: deque[InlineFuture]) -> None:
    if len(futures) == 1:
        futures.popleft().wake_now()
        return
    afterwards: dict[Callable[[], None], None] = {}
    _batch.callbacks = afterwards
    try:
        while futures:
            futures.popleft().wake_now()
    finally:
        _batch.callbacks = None
        for future in futures:  # the loop is about to end: should it run again, so do they
            future.wake_later()
        _call_all(afterwards)


def _call_all(callbacks: dict[Callable[[], None], None]) -> None:
    """Call them, whatever one of them raises."""
    try:
        while callbacks:
            callbacks.popitem()[0]()
    finally:
        if callbacks:
            _call_all(callbacks)
