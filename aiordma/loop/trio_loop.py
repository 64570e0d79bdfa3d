"""TrioLoop: the event-loop methods that the core needs, on trio."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

logger = logging.getLogger(__name__)


class TrioFuture:
    """A future that wakes one task. Awaiting it is a checkpoint, even if it is set already."""

    __slots__ = ("_is_done", "_task")

    def __init__(self) -> None:
        self._is_done = False
        self._task: trio.lowlevel.Task | None = None

    def done(self) -> bool:
        """Return True if the future was set, or the task that awaited it was cancelled."""
        return self._is_done

    def set_result(self, result: None, /) -> None:
        """Wake the waiting task."""
        self._is_done = True
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        if self._is_done:
            await trio.lowlevel.checkpoint()
            return
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._is_done, self._task = True, None
        return trio.lowlevel.Abort.SUCCEEDED


class TrioTaskGroup:
    """A trio nursery with the methods of asyncio.TaskGroup."""

    def __init__(self) -> None:
        self._manager: AbstractAsyncContextManager[trio.Nursery] = trio.open_nursery()
        self._nursery: trio.Nursery

    async def __aenter__(self) -> TrioTaskGroup:
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(exc_type, exc, traceback)

    def create_task(self, coro: Coroutine[object, None, None], /) -> None:
        """Have a task of the nursery await `coro`."""
        self._nursery.start_soon(_await, coro, name=coro)


class _EndOfRun(trio.abc.Instrument):
    """An instrument that records the end of a run. No task has to wait for it."""

    def __init__(self) -> None:
        self.is_over = False

    def after_run(self) -> None:
        self.is_over = True


class _BeforeWait(trio.abc.Instrument):
    """An instrument that calls a function before trio waits. It is cheap: trio calls it directly.

    It is active until cancel().
    """

    def __init__(self, callback: Callable[[float], None]) -> None:
        self.before_io_wait = callback  # type: ignore[method-assign, assignment]
        trio.lowlevel.add_instrument(self)

    def cancel(self) -> None:
        trio.lowlevel.remove_instrument(self)


class TrioLoop:
    """One run of trio, as a loop. Callbacks run in system tasks.

    Ctrl-C does not interrupt system tasks. The task of a removed reader ends soon.
    """

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._readers: dict[int, trio.CancelScope] = {}
        self._end = _EndOfRun()
        trio.lowlevel.add_instrument(self._end)

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None:
        """Call `callback` whenever `fd` is readable."""
        self.remove_reader(fd)
        scope = self._readers[fd] = trio.CancelScope()
        trio.lowlevel.spawn_system_task(_watch, scope, fd, callback, name=f"aiordma fd {fd}")

    def remove_reader(self, fd: int, /) -> None:
        """Stop calling back for `fd`. The caller can close it right afterwards."""
        scope = self._readers.pop(fd, None)
        if scope is not None and not self.is_closed():
            scope.cancel()

    def create_future(self) -> TrioFuture:
        """Return a new future for one waiting task."""
        return TrioFuture()

    def call_soon_threadsafe(self, callback: Callable[[], None], /) -> None:
        """Call `callback` on the loop's thread, soon. Callable from any thread.

        Raises:
            RuntimeError: the run is over.
        """
        try:
            self._token.run_sync_soon(_call, callback)
        except trio.RunFinishedError:
            # trio takes no more calls some time before it reports the end of the run. Callers
            # that get this error call trio no more.
            self._end.is_over = True
            raise

    call_soon = call_soon_threadsafe

    checkpoint = staticmethod(trio.lowlevel.checkpoint)
    """Let other tasks run, and raise if the task is cancelled."""

    checkpoint_if_cancelled = staticmethod(trio.lowlevel.checkpoint_if_cancelled)
    """Raise if the task is cancelled."""

    schedule_point = staticmethod(trio.lowlevel.cancel_shielded_checkpoint)
    """Let other tasks run. It cannot be cancelled."""

    def call_before_wait(self, callback: Callable[[float], None], /) -> _BeforeWait:
        """Call `callback` in each iteration, before the loop waits for descriptors.

        Its argument is the time in seconds that the loop waits at most. It calls end_wait() if it
        has woken a task.
        """
        return _BeforeWait(callback)

    def end_wait(self) -> None:
        """Have the wait that the loop is about to begin end at once."""
        self._token.run_sync_soon(_do_nothing, idempotent=True)

    def is_closed(self) -> bool:
        """Return True if the run is over."""
        return self._end.is_over

    def time(self) -> float:
        """Return trio's clock, in seconds."""
        return trio.current_time()

    def call_later(self, delay: float, callback: Callable[[], None], /) -> None:
        """Call `callback` after `delay` seconds."""
        trio.lowlevel.spawn_system_task(_call_after, delay, callback, name="aiordma timer")

    def create_task(self, coro: Coroutine[object, None, None], /) -> trio.lowlevel.Task:
        """Run `coro` in a new system task. It must not raise an exception."""
        return trio.lowlevel.spawn_system_task(_await, coro, name=coro)

    def task_group(self) -> TrioTaskGroup:
        """Return a new task group."""
        return TrioTaskGroup()


async def _watch(scope: trio.CancelScope, fd: int, callback: Callable[[], None]) -> None:
    # The scope is checked before each step: the reader can be removed, and the descriptor closed,
    # before this task first runs, when it is about to resume, or by the callback.
    with scope:
        while not scope.cancel_called:
            await trio.lowlevel.wait_readable(fd)
            if not scope.cancel_called:
                _call(callback)


async def _call_after(delay: float, callback: Callable[[], None]) -> None:
    await trio.sleep(delay)
    _call(callback)


async def _await(coro: Coroutine[object, None, None]) -> None:
    await coro


def _do_nothing() -> None:
    """Do nothing: the call itself is what ends a wait."""


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # log it as asyncio does; otherwise it would end the whole trio run
        logger.exception("%r failed", callback)


_loop: trio.lowlevel.RunVar[TrioLoop] = trio.lowlevel.RunVar("aiordma loop")


def running_trio_loop() -> TrioLoop | None:
    """Return the loop of the calling task's trio run, or None if it is not a trio task."""
    if not trio.lowlevel.in_trio_task():
        return None
    try:
        return _loop.get()
    except LookupError:
        loop = TrioLoop()
        _loop.set(loop)
        return loop
