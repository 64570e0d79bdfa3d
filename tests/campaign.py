"""Helpers of the long campaigns: rounds until a time limit, and printed figures."""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from helpers import TIME_LIMIT

SECONDS = float(os.environ.get("AIORDMA_SOAK_SECONDS", "120"))
REPORT_EVERY = 15.0


class Campaign:
    """A source of random choices, and counts of what has happened in a test."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._seed = random.randrange(1 << 32)
        self._name, self._capsys = name, capsys
        self.chance = random.Random(self._seed)
        self.figures: Counter[str] = Counter()

    def rounds(self) -> Iterator[None]:
        """Yield until SECONDS have passed. Print the figures regularly."""
        begin = last = time.monotonic()
        while (now := time.monotonic()) - begin < SECONDS:
            if now - last > REPORT_EVERY:
                self._print(f"{now - begin:.0f} s")
                last = now
            yield
            self.figures["rounds"] += 1
        self._print(f"done after {SECONDS:.0f} s")

    def _print(self, text: str) -> None:
        with self._capsys.disabled():
            print(f"{self._name}, seed {self._seed}: {text}, {dict(self.figures)}", flush=True)


@pytest.fixture
def campaign(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Campaign:
    return Campaign(request.node.name, capsys)


async def finish(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until all tasks are done. After TIME_LIMIT, fail with the stacks of all tasks."""
    _, pending = await asyncio.wait(tasks, timeout=TIME_LIMIT)
    if pending:
        stacks = io.StringIO()
        for task in asyncio.all_tasks():
            task.print_stack(limit=8, file=stacks)
        pytest.fail(f"{len(pending)} tasks have not ended\n{stacks.getvalue()}")
