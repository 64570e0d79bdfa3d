"""The rules of anyio: its exceptions in place of those of aiordma, and its checkpoints."""

from __future__ import annotations

from typing import NoReturn

from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError
from anyio.lowlevel import checkpoint

from aiordma.errors import BusyError, LocalClosed, RdmaError
from aiordma.loop import Checkpoint, checkpoint_of, running_loop


def raise_as_anyio(error: RdmaError, action: str, *, is_over: bool) -> NoReturn:
    """Raise the anyio exception for `error`, with `error` as its cause.

    `is_over` is True if the stream or listener can no longer be used. If it still can, `error` is
    raised unchanged: for example the lack of memory for one message.
    """
    if isinstance(error, BusyError):
        raise BusyResourceError(action) from error
    if isinstance(error, LocalClosed):
        raise ClosedResourceError(str(error)) from error
    if is_over:
        raise BrokenResourceError(str(error)) from error
    raise error


def adapter_checkpoint() -> Checkpoint:
    """Return the function that an adapter awaits before its call, on the running loop.

    On trio each call of aiordma is a checkpoint already. On asyncio a call that need not wait is
    not. The checkpoint comes before any data is received or sent, so that cancelling loses nothing.
    """
    return checkpoint if checkpoint_of(type(running_loop())) is None else _no_checkpoint


async def _no_checkpoint() -> None:
    pass
