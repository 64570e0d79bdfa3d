"""Checkpoints: what an await owes trio even when it has nothing to wait for; and asyncio nothing.

Every await of trio's lets others run, and can be cancelled. What only ever waits does that anyway;
what may find everything ready passes a checkpoint before it takes anything: entered in a cancelled
scope, it does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from aiordma.loop.current import running_loop
from aiordma.loop.protocol import Loop
from aiordma.loop.workers import is_forked_child


@runtime_checkable
class Checkpointing(Protocol):
    """A loop that is owed checkpoints."""

    async def checkpoint(self) -> None:
        """Let other tasks run, and be cancelled if that is due."""

    async def checkpoint_if_cancelled(self) -> None:
        """Be cancelled if that is due."""


Checkpoint = Callable[[], Awaitable[None]]


def checkpoint_of(loop: Loop) -> Checkpoint | None:
    """The checkpoint that is to be awaited; None: the loop is owed none."""
    return loop.checkpoint if isinstance(loop, Checkpointing) else None


def cancellation_of(loop: Loop) -> Checkpoint | None:
    """Half of it, for what will wait later on: be cancelled if that is due. None: as above."""
    return loop.checkpoint_if_cancelled if isinstance(loop, Checkpointing) else None


async def checkpoint() -> None:
    """Let other tasks run, and be cancelled if that is due, if the running loop is owed that.

    Nothing in a forked child, where asyncio says that no loop runs: it is on its way out.
    """
    if is_forked_child():
        return
    pause = checkpoint_of(running_loop())
    if pause is not None:
        await pause()
