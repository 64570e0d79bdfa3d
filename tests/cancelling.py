"""Helpers that cancel one await at a known point.

A test of the state after a cancelled await is marked `awaits("Class.method", ...)`. A unit test
compares these marks with the public awaits and with the table in docs/cancelling.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import loops

from aiordma.loop import Loop, workers
from aiordma.rdmacm import id_calls

Start = Callable[[], Awaitable[Any]]
# Seconds in which a worker thread normally completes its work. Time is the subject here: it selects
# the moment of the cancellation. The test's assertions hold at any moment.
WORKER_TIME = 0.01


async def cancel(start: Start) -> None:
    """Start an await, and cancel it while it waits. It must not end before.

    If it waits for a worker thread, the thread has normally completed its work by then, and its
    result is delivered to the loop only afterwards.
    """
    with _results_held_back():
        assert await cancelled(start, seconds=WORKER_TIME), "it ended before it was cancelled"


async def cancelled(start: Start, *, seconds: float = 0.0, begun: bool = True) -> bool:
    """Start an await, and cancel it after `seconds`. Return True if it was cancelled.

    False: it ended before. With `begun=False` it is cancelled before its first step; on trio it
    then starts in a scope that is cancelled already.
    """
    task = loops.create_task(start())
    if begun:
        for _ in range(3):  # trio runs tasks in any order: one iteration might not be enough
            await loops.sleep(0)
        await loops.sleep(seconds)
    task.cancel()
    await loops.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()


@contextmanager
def _results_held_back() -> Iterator[None]:
    """Deliver the results of threads to the loop only after the block."""
    held: list[tuple[Loop, Callable[[], None]]] = []
    ended_calls: list[Callable[[], None]] = []
    calls: Any = id_calls.EndedCalls
    take = calls.take

    def hold(ended: id_calls.EndedCalls) -> list[Callable[[], None]]:
        ended_calls.extend(take(ended))
        return []

    calls.take = hold
    module: Any = workers
    call_threadsafe = module.call_threadsafe
    module.call_threadsafe = lambda loop, callback: held.append((loop, callback))
    try:
        yield
    finally:
        calls.take = take
        for on_end in ended_calls:
            on_end()
        module.call_threadsafe = call_threadsafe
        for loop, callback in held:
            call_threadsafe(loop, callback)
