"""Task groups and background tasks, for what the library itself runs concurrently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Protocol, runtime_checkable

from aiordma.loop.protocol import Loop

logger = logging.getLogger(__name__)


class TaskGroup(Protocol):
    """A group of tasks. They have all ended at the end of the group's `async with` block."""

    async def __aenter__(self) -> TaskGroup: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...

    def create_task(self, coro: Coroutine[object, None, None], /) -> object:
        """Run `coro` in a task of the group."""


@runtime_checkable
class _HasTaskGroup(Protocol):
    def task_group(self) -> TaskGroup: ...


def task_group(loop: Loop) -> TaskGroup:
    """Return a task group for `loop`: an asyncio.TaskGroup, or one made of a trio nursery."""
    return loop.task_group() if isinstance(loop, _HasTaskGroup) else asyncio.TaskGroup()


def run_in_background(loop: Loop, coro: Coroutine[object, None, None]) -> None:
    """Run `coro` in a task of its own, without waiting for it. An exception is only logged.

    The task is cancelled at the end of asyncio.run() and of trio.run().
    """

    task: object = None
    is_over = False

    async def run() -> None:
        nonlocal is_over
        try:
            await coro
        except Exception:
            logger.exception("a background task failed")
        finally:
            is_over = True
            _background.discard(task)

    task = loop.create_task(run())
    if not is_over:  # it is over already if tasks are eager and it has not waited
        _background.add(task)


# A loop has only weak references to its tasks.
_background: set[object] = set()
