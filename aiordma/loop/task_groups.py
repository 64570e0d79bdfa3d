"""Task groups, for what the library itself runs side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Protocol, runtime_checkable

from aiordma.loop.protocol import Loop


class TaskGroup(Protocol):
    """Tasks that have all ended at the end of its `async with` block."""

    async def __aenter__(self) -> TaskGroup: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...

    def create_task(self, coro: Coroutine[object, None, None], /) -> object:
        """Run `coro` in a task."""


@runtime_checkable
class _Grouping(Protocol):
    def task_group(self) -> TaskGroup: ...


def task_group(loop: Loop) -> TaskGroup:
    """A task group of the running loop: asyncio.TaskGroup, or trio's nursery."""
    return loop.task_group() if isinstance(loop, _Grouping) else asyncio.TaskGroup()
