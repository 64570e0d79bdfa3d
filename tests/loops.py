"""The functions of asyncio that tests use, for asyncio, uvloop and trio.

On asyncio and uvloop they call asyncio's functions. On trio they use nurseries and cancel scopes.
So cancelling works there as trio defines it: every await in a cancelled scope raises (level
cancellation), not only the current one (edge cancellation).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import time
from asyncio import constants
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

import blocking
import trio
import trio.testing
import uvloop

# The time limit of until(), in seconds. It is far more than any condition needs on a slow machine.
# The limit of a whole test (TIME_LIMIT in helpers.py) is longer, and would not say what is missing.
UNTIL_LIMIT = 100.0
# The longest time between two checks of until(), in seconds.
UNTIL_INTERVAL = 0.01

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TaskCancelled(BaseException):
    """Raised by awaiting a TrioTask that was cancelled."""


# Raised if the current task is cancelled, or by awaiting a task that was cancelled.
CancelledError = (asyncio.CancelledError, trio.Cancelled, TaskCancelled)


def on_trio() -> bool:
    """Return True in a trio task."""
    return trio.lowlevel.in_trio_task()


def kind() -> str:
    """Return the kind of the running loop: "asyncio", "uvloop" or "trio"."""
    if on_trio():
        return "trio"
    return "uvloop" if isinstance(asyncio.get_running_loop(), uvloop.Loop) else "asyncio"


def run(kind: str, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `body()` on a new loop of this kind. Return its result. asyncio runs in debug mode."""
    if kind == "trio":
        return trio.run(in_nursery, body, strict_exception_groups=True)
    with _short_tracebacks(), _ASYNCIO[kind]() as runner:
        return runner.run(body())


@contextlib.contextmanager
def _short_tracebacks() -> Iterator[None]:
    """Shorten the stacks that asyncio's debug mode stores for each future and callback.

    Tests do not use them, and storing whole stacks would take most of the time.
    """
    sys.tracebacklimit = 1
    try:
        yield
    finally:
        vars(sys).pop("tracebacklimit", None)  # another thread can have removed it


vars(constants)["DEBUG_STACK_DEPTH"] = 1  # for the same reason

_ASYNCIO = {
    "asyncio": lambda: asyncio.Runner(debug=True),
    "uvloop": lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop),
}
KINDS = (*_ASYNCIO, "trio")


async def in_nursery(body: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `body()`. On trio, create_task() then uses a nursery of its own."""
    if not on_trio():
        return await body()
    task = TrioTask[T]()
    async with trio.open_nursery() as nursery:
        _nursery.set(nursery)
        await task.run(body())
        nursery.cancel_scope.cancel()
    return task.result()  # raises the error itself, not an exception group


def runner_of_this_kind() -> Callable[[Callable[[], Coroutine[Any, Any, T]]], T]:
    """Return a function for another thread. It runs a body on a new loop of the current kind."""
    return functools.partial(run, kind())


class Task(Protocol[T_co]):
    """A task: asyncio.Task or TrioTask."""

    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> T_co: ...
    def __await__(self) -> Generator[Any, None, T_co]: ...


class TrioTask(Generic[T]):
    """A trio task with a result, like asyncio.Task."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._result: T
        self._error: BaseException | None = None

    async def run(self, awaitable: Awaitable[T]) -> None:
        """Await, and store the result or the error."""
        try:
            with self._scope:
                self._result = await awaitable
            if self._scope.cancelled_caught:
                self._error = TaskCancelled()
        except trio.Cancelled:  # the whole test is cancelled
            self._error = TaskCancelled()
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest.fail() raises one, too
            self._error = error
        finally:
            self._ended.set()

    def cancel(self) -> bool:
        """Cancel the task. Return False if it is done.

        If its await has completed already, the task goes on with the result; asyncio would
        cancel it even then.
        """
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
        """Wait until the task has ended. Raises no error of the task."""
        await self._ended.wait()

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.wait().__await__()
        return self.result()


_nursery: trio.lowlevel.RunVar[trio.Nursery] = trio.lowlevel.RunVar("the test's nursery")


def create_task(awaitable: Awaitable[T]) -> Task[T]:
    """Run an awaitable in a task of its own. It need not be a coroutine."""
    if not on_trio():
        return asyncio.ensure_future(awaitable)
    task = TrioTask[T]()
    _nursery.get().start_soon(task.run, awaitable)
    return task


async def wait(tasks: Iterable[Any]) -> None:
    """Wait until all tasks have ended, with or without an error."""
    for task in tasks:
        await (task.wait() if isinstance(task, TrioTask) else asyncio.wait([task]))


async def cancel(*tasks: Task[Any]) -> None:
    """Cancel tasks, and check that they end without a result."""
    for task in tasks:
        task.cancel()
    await wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """Return the results of all. An error does not cancel the others."""
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


def now() -> float:
    """Return the time of the current loop in seconds."""
    return trio.current_time() if on_trio() else asyncio.get_running_loop().time()


async def sleep(seconds: float) -> None:
    """Sleep on the current loop."""
    if on_trio():
        await trio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def until(
    condition: Callable[[], object], what: str, *, seconds: float = UNTIL_LIMIT
) -> None:
    """Wait until `condition()` returns a true value.

    Use it for a condition that no event reports, on any loop. The condition can be an async
    function. It is checked at short intervals. `what` completes the sentence "waited for ...": it
    names the object, and what has to happen to it.

    Raises:
        AssertionError: the condition was still not true after `seconds`.
    """
    deadline = now() + seconds
    pause = 0.0
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if now() > deadline:
            raise AssertionError(f"waited for {what}, in vain for {seconds:.0f} seconds")
        await sleep(pause)
        pause = min(pause + 0.0005, UNTIL_INTERVAL)


def block(seconds: float) -> None:
    """Block the thread for this time. Devices and the network go on."""
    with blocking.allowed():
        time.sleep(seconds)


def block_until(condition: Callable[[], object], what: str) -> None:
    """Block the thread until `condition()` returns a true value. Arguments and error as until()."""
    deadline = time.monotonic() + UNTIL_LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}, in vain"
        time.sleep(UNTIL_INTERVAL / 10)


async def settle() -> None:
    """Let the tasks run that can run, including new ones."""
    if on_trio():
        await trio.testing.wait_all_tasks_blocked()
    else:
        await asyncio.sleep(0)


async def start(awaitable: Awaitable[T]) -> Task[T]:
    """Start a task, and let it run until it waits."""
    task = create_task(awaitable)
    await settle()
    return task


@contextlib.asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than `seconds`."""
    if not on_trio():
        async with asyncio.timeout(seconds):
            yield
        return
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError


async def wait_for(awaitable: Awaitable[T], seconds: float) -> T:
    """Await. Raise TimeoutError after `seconds`."""
    async with timeout(seconds):
        return await awaitable


async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a blocking function in a thread. Return its result."""
    if on_trio():
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)
    return await asyncio.to_thread(function, *arguments)


class TaskGroup:
    """An asyncio task group or a trio nursery. If one task fails, the others are cancelled."""

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
        """Start a task in the group."""
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
    """Return a new event of the current loop's library."""
    return trio.Event() if on_trio() else asyncio.Event()
