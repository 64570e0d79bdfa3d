"""Doing the same many times, so many at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiordma.loop import running_loop, task_group


async def repeat(count: int, at_once: int, do: Callable[[], Awaitable[None]]) -> None:
    """Await `do()` so many times, in at most `at_once` tasks, each as soon as it can."""
    left = [None] * count

    async def work() -> None:
        while left:
            left.pop()
            await do()

    async with task_group(running_loop()) as tasks:
        for _ in range(min(at_once, count)):
            tasks.create_task(work())
