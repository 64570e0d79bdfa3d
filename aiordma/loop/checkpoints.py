"""Checkpoints: what an await owes trio even when it has nothing to wait for; and asyncio nothing.

Every await of trio's lets others run, and can be cancelled. What only ever waits does that anyway;
what may find everything ready passes a checkpoint before it takes anything: entered in a cancelled
scope, it does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma.loop.current import running_loop
from aiordma.loop.forked import is_forked_child
from aiordma.loop.protocol import Loop

Checkpoint = Callable[[], Awaitable[None]]


def checkpoint_of(loop: Loop) -> Checkpoint | None:
    """What lets other tasks run, and is cancelled if that is due; None: the loop is owed none."""
    pause: Checkpoint | None = getattr(loop, "checkpoint", None)
    return pause


def cancellation_of(loop: Loop) -> Checkpoint | None:
    """Half of it, for what will wait later on: is cancelled if that is due. None: as above."""
    pause: Checkpoint | None = getattr(loop, "checkpoint_if_cancelled", None)
    return pause


async def checkpoint() -> None:
    """Let other tasks run, and be cancelled if that is due, if the running loop is owed that.

    Nothing in a forked child, where asyncio says that no loop runs: it is on its way out.
    """
    if is_forked_child():
        return
    pause = checkpoint_of(running_loop())
    if pause is not None:
        await pause()


async def checkpoint_if_cancelled() -> None:
    """Be cancelled if that is due, if the running loop is owed that."""
    pause = cancellation_of(running_loop())
    if pause is not None:
        await pause()
