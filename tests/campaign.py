"""Helpers of the long campaigns: rounds until a time limit, and printed figures."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from helpers import TIME_LIMIT

SECONDS = float(os.environ.get("AIORDMA_SOAK_SECONDS", "120"))
REPORT_EVERY = 15.0


def until_time_is_up(what: str, figures: Counter[str]) -> Iterator[int]:
    """Yield the number of each round until SECONDS have passed. Print the figures regularly."""
    begin = last = time.monotonic()
    number = 0
    while (now := time.monotonic()) - begin < SECONDS:
        if now - last > REPORT_EVERY:
            print(f"{what}: {now - begin:.0f} s, {dict(figures)}", flush=True)
            last = now
        yield number
        number += 1
    print(f"{what}: done after {SECONDS:.0f} s, {number} rounds, {dict(figures)}", flush=True)


async def finish(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until all tasks are done. After TIME_LIMIT, fail with the stacks of all tasks."""
    _, pending = await asyncio.wait(tasks, timeout=TIME_LIMIT)
    if pending:
        stacks = io.StringIO()
        for task in asyncio.all_tasks():
            task.print_stack(limit=8, file=stacks)
        pytest.fail(f"{len(pending)} tasks have not ended\n{stacks.getvalue()}")
