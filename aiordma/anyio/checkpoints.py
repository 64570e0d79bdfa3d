"""anyio's rule that every await is a checkpoint, where the core does not follow it already."""

from __future__ import annotations

from anyio.lowlevel import checkpoint

from aiordma.loop import Checkpoint, checkpoint_of, running_loop


def owed_checkpoint() -> Checkpoint:
    """What to await besides the core's own call, on the running loop.

    On trio the core passes a checkpoint itself; on asyncio it does not, where everything is ready.
    It comes before anything is taken or sent, so that a cancellation loses nothing.
    """
    return checkpoint if checkpoint_of(running_loop()) is None else _nothing


async def _nothing() -> None:
    pass
