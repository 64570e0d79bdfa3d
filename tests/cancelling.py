"""Cancelling one await, at a known point.

A test that says what an await leaves behind is marked `awaits("Class.method", ...)`; a unit test
compares these marks with the public awaits, and with the table in docs/cancelling.md.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import loops

from aiordma.loop import Loop

Start = Callable[[], Awaitable[Any]]
# Long enough for a worker thread to make what it was asked to make.
A_MOMENT = 0.01


async def cancel(start: Start) -> None:
    """Start an await, and cancel it once it waits, which it must still do.

    If it waits for a worker thread, that has done its work by then, as a rule, and its result is
    on the way.
    """
    with _results_held_back():
        assert await cancelled(start, seconds=A_MOMENT), "it had nothing to wait for"


async def cancelled(start: Start, *, seconds: float = 0.0, begun: bool = True) -> bool:
    """Likewise, but it may also have come to its end; whether it was cancelled.

    With `begun=False` it is cancelled before its first step: on trio, entered in a scope that is
    cancelled already.
    """
    task = loops.create_task(start())
    if begun:
        for _ in range(3):  # trio runs tasks in any order: one turn might not be enough
            await loops.sleep(0)
        await loops.sleep(seconds)
    task.cancel()
    await loops.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()


@contextmanager
def _results_held_back() -> Iterator[None]:
    """What worker threads have done, the loop does not learn before the end of the block."""
    held: list[tuple[Loop, Callable[[], None]]] = []
    module: Any = sys.modules["aiordma.loop.workers"]  # the package has a `workers` of its own
    post = module.post
    module.post = lambda loop, callback: held.append((loop, callback))
    try:
        yield
    finally:
        module.post = post
        for loop, callback in held:
            post(loop, callback)
