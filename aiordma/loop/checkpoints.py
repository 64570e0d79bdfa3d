"""Checkpoints, which trio requires of every await and asyncio does not.

On trio every await lets other tasks run and can be cancelled, even if everything is ready. An await
that always waits does both anyway. An await that might not have to wait executes a checkpoint
before it takes or posts anything. So it has no effect if it is entered in a cancelled scope.

The awaits for each message execute the halves of a checkpoint: first the one that raises if the
task is cancelled, and, after they have taken or posted, the one that lets other tasks run. So the
peer works on a message while other tasks run here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Generator

from aiordma.loop.current import running_loop
from aiordma.loop.forked import is_forked_child
from aiordma.loop.protocol import Loop

Checkpoint = Callable[[], Coroutine[object, None, None]]


# Cached for each class of loops: each connection calls them, and a hit makes no Python call.
@functools.cache
def checkpoint_of(kind: type[Loop]) -> Checkpoint | None:
    """Return the function that executes a full checkpoint, or None if such a loop requires none.

    A full checkpoint lets other tasks run, and raises if the task is cancelled.
    """
    function: Checkpoint | None = getattr(kind, "checkpoint", None)
    return function


@functools.cache
def cancellation_of(kind: type[Loop]) -> Checkpoint | None:
    """Return the function that raises if the task is cancelled, or None if none is required.

    This half of a checkpoint is for an await that waits later on, which lets other tasks run.
    """
    function: Checkpoint | None = getattr(kind, "checkpoint_if_cancelled", None)
    return function


@functools.cache
def schedule_point_of(kind: type[Loop]) -> Checkpoint | None:
    """Return the function that lets other tasks run, or None if such a loop requires none.

    It cannot be cancelled. This half of a checkpoint is for an await that has taken or posted
    something.
    """
    function: Checkpoint | None = getattr(kind, "schedule_point", None)
    return function


@functools.cache
def checkpoint_halves_of(kind: type[Loop]) -> tuple[Checkpoint, Checkpoint] | None:
    """Return cancellation_of() and schedule_point_of(), or None if such a loop requires none.

    The awaits of the fast path execute them: see _native/fast_path/attempt.c.
    """
    first, second = cancellation_of(kind), schedule_point_of(kind)
    return (first, second) if first and second else None


async def checkpoint(loop: Loop | None = None) -> None:
    """Execute a full checkpoint if the running loop requires one, as only trio's do.

    `loop` is the running loop, if the caller knows it. Do nothing in a forked child: asyncio raises
    there because no loop is running, and all that the child can still do is close its objects.
    """
    if "trio" not in sys.modules or is_forked_child():
        return
    execute = checkpoint_of(type(loop or running_loop()))
    if execute is not None:
        await execute()


async def checkpoint_if_cancelled() -> None:
    """Raise if the task is cancelled and the running loop requires checkpoints."""
    execute = cancellation_of(type(running_loop()))
    if execute is not None:
        await execute()


def yield_of(loop: Loop) -> Checkpoint:
    """Return the function that lets other tasks run, and the loop look for events, on any loop."""
    return checkpoint_of(type(loop)) or _bare_yield


class _Yield:
    """The awaitable of asyncio.sleep(0): the task resumes in the loop's next iteration."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _bare_yield() -> None:
    await _Yield()
