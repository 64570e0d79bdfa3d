"""What test bodies say to the loop they run on: asyncio's words, and what they mean on trio.

On asyncio and uvloop these are asyncio's own functions. On trio they are small counterparts over
nurseries and cancel scopes, so that cancelling there is trio's: of a level, not of a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import trio
import trio.testing
import uvloop

T = TypeVar("T")


class TaskCancelled(BaseException):
    """What awaiting a task of trio's raises that was cancelled."""


# Of one's own task, or of one that is awaited.
CancelledError = (asyncio.CancelledError, trio.Cancelled, TaskCancelled)


def on_trio() -> bool:
    return trio.lowlevel.in_trio_task()


def kind() -> str:
    """Which loop really runs: "asyncio", "uvloop" or "trio"."""
    if on_trio():
        return "trio"
    return "uvloop" if isinstance(asyncio.get_running_loop(), uvloop.Loop) else "asyncio"


def run(kind: str, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `body` returns, run on a new loop of that kind. asyncio's is in debug mode."""
    if kind == "trio":
        return trio.run(_in_a_nursery, body, strict_exception_groups=True)
    with _short_tracebacks(), _ASYNCIO[kind]() as runner:
        return runner.run(body())


@contextlib.contextmanager
def _short_tracebacks() -> Iterator[None]:
    """In debug mode asyncio notes where each future and each callback was made: of no use here, and
    with whole stacks it would take most of the time."""
    sys.tracebacklimit = 1
    try:
        yield
    finally:
        vars(sys).pop("tracebacklimit", None)  # another thread's loop may have been faster


asyncio.constants.DEBUG_STACK_DEPTH = 1

_ASYNCIO = {
    "asyncio": lambda: asyncio.Runner(debug=True),
    "uvloop": lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop),
}
KINDS = (*_ASYNCIO, "trio")


async def _in_a_nursery(body: Callable[[], Awaitable[T]]) -> T:
    task = TrioTask[T]()
    async with trio.open_nursery() as nursery:
        _nursery.set(nursery)
        await task.run(body())
        nursery.cancel_scope.cancel()
    return task.result()  # its error as itself, not in a group


def another_like_this() -> Callable[[Callable[[], Coroutine[Any, Any, T]]], T]:
    """What runs something on another loop of the kind that runs now; for another thread."""
    return functools.partial(run, kind())


class Task(Protocol[T]):
    """A coroutine that runs beside the test's own."""

    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> T: ...
    def __await__(self) -> Generator[Any, None, T]: ...


class TrioTask(Generic[T]):
    """A task of trio's with a result."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._result: T
        self._error: BaseException | None = None

    async def run(self, awaitable: Awaitable[T]) -> None:
        try:
            with self._scope:
                self._result = await awaitable
            if self._scope.cancelled_caught:
                self._error = TaskCancelled()
        except trio.Cancelled:  # of the whole test
            self._error = TaskCancelled()
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest's own among them
            self._error = error
        finally:
            self._ended.set()

    def cancel(self) -> bool:
        """What is about to go on with what it has waited for does so, other than on asyncio."""
        self._scope.cancel()
        return not self.done()

    def done(self) -> bool:
        return self._ended.is_set()

    def cancelled(self) -> bool:
        return isinstance(self._error, TaskCancelled)

    def exception(self) -> BaseException | None:
        assert self.done()
        if isinstance(self._error, TaskCancelled):
            raise self._error
        return self._error

    def result(self) -> T:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._result

    async def wait(self) -> None:
        await self._ended.wait()

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.wait().__await__()
        return self.result()


_nursery: trio.lowlevel.RunVar[trio.Nursery] = trio.lowlevel.RunVar("the test's nursery")


def create_task(awaitable: Awaitable[T]) -> Task[T]:
    """Run something beside the test, which need not be a coroutine."""
    if not on_trio():
        return asyncio.ensure_future(awaitable)
    task = TrioTask[T]()
    _nursery.get().start_soon(task.run, awaitable)
    return task


async def wait(tasks: Iterable[Any]) -> None:
    """Wait until all have ended, however."""
    for task in tasks:
        await (task.wait() if isinstance(task, TrioTask) else asyncio.wait([task]))


async def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """The results of all; the first that fails leaves the others alone."""
    if not on_trio():
        return await asyncio.gather(*awaitables, return_exceptions=return_exceptions)
    tasks = [
        awaitable if isinstance(awaitable, TrioTask) else create_task(awaitable)
        for awaitable in awaitables
    ]
    await wait(tasks)
    if return_exceptions:
        return [_outcome(task) for task in tasks]
    return [task.result() for task in tasks]


def _outcome(task: Task[Any]) -> Any:
    try:
        return task.result()
    except (Exception, TaskCancelled) as error:
        return error


async def sleep(seconds: float) -> None:
    if on_trio():
        await trio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def settle() -> None:
    """Let the tasks that can run do so, those that were just made among them."""
    if on_trio():
        await trio.testing.wait_all_tasks_blocked()
    else:
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """TimeoutError if the block takes longer."""
    if not on_trio():
        async with asyncio.timeout(seconds):
            yield
        return
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError


async def wait_for(awaitable: Awaitable[T], seconds: float) -> T:
    async with timeout(seconds):
        return await awaitable


async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns that blocks."""
    if on_trio():
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)
    return await asyncio.to_thread(function, *arguments)


class TaskGroup:
    """asyncio's task group, or trio's nursery: one task that fails ends all."""

    def __init__(self) -> None:
        self._group = trio.open_nursery() if on_trio() else asyncio.TaskGroup()
        self._entered: trio.Nursery | asyncio.TaskGroup

    async def __aenter__(self) -> TaskGroup:
        self._entered = await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._group.__aexit__(exc_type, exc, traceback)

    def create_task(self, coroutine: Coroutine[Any, Any, T]) -> Task[T]:
        if isinstance(self._entered, asyncio.TaskGroup):
            return self._entered.create_task(coroutine)
        task = TrioTask[T]()
        self._entered.start_soon(_run_or_fail, task, coroutine)
        return task


async def _run_or_fail(task: TrioTask[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
    await task.run(coroutine)
    if not task.cancelled():
        task.result()


def make_event() -> asyncio.Event | trio.Event:
    return trio.Event() if on_trio() else asyncio.Event()
