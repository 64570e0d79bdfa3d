"""anyio's rules: its exceptions for those of aiordma, and its checkpoints."""

from __future__ import annotations

from typing import NoReturn

from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError
from anyio.lowlevel import checkpoint

from aiordma.errors import BusyError, LocalClosed, RdmaError
from aiordma.loop import Checkpoint, checkpoint_of, running_loop


def raise_as_anyio(error: RdmaError, action: str, *, is_over: bool) -> NoReturn:
    """Raise what anyio has for `error`, which stays its cause.

    An error that has not ended what is used, such as the lack of memory for one message, is raised
    as it is: `is_over` tells.
    """
    if isinstance(error, BusyError):
        raise BusyResourceError(action) from error
    if isinstance(error, LocalClosed):
        raise ClosedResourceError(str(error)) from error
    if is_over:
        raise BrokenResourceError(str(error)) from error
    raise error


def adapter_checkpoint() -> Checkpoint:
    """What to await besides the core's own call, on the running loop.

    On trio the core passes a checkpoint itself; on asyncio it does not, where everything is ready.
    It comes before anything is taken or sent, so that a cancellation loses nothing.
    """
    return checkpoint if checkpoint_of(running_loop()) is None else _nothing


async def _nothing() -> None:
    pass
