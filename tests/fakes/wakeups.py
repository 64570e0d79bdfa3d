"""Tasks that one event wakes together. Each of them then calls a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiordma.loop import make_future, run_with_inline_wakeups, running_loop


async def waiting(calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[asyncio.Task[None]]]:
    """Start tasks that wait. Return the futures that they wait for, and the tasks."""

    async def wait_and_call(future: Any, call: Callable[[], Any]) -> None:
        await future
        result = call()
        if result is not None:
            await result

    futures: list[Any] = [make_future(running_loop()) for _ in calls]
    tasks = [
        asyncio.create_task(wait_and_call(future, call))
        for future, call in zip(futures, calls, strict=True)
    ]
    await asyncio.sleep(0)
    return futures, tasks


async def woken(*calls: Callable[[], Any]) -> list[asyncio.Task[None]]:
    """Start tasks and wake them together. Return the tasks after they have made their calls."""
    futures, tasks = await waiting(calls)
    await called_by_the_loop(lambda: run_with_inline_wakeups(lambda: wake_all(futures)))
    return tasks


def wake_all(futures: Sequence[Any]) -> None:
    for future in futures:
        future.set_result(None)


async def called_by_the_loop(callback: Callable[[], object]) -> None:
    """Let the loop call the callback, as for an event: not in a task. Raise what it raises."""
    done = running_loop().create_future()

    def call() -> None:
        try:
            callback()
        except BaseException as error:
            raised.append(error)
        done.set_result(None)

    raised: list[BaseException] = []
    running_loop().call_soon(call)
    await done
    if raised:
        raise raised[0]
