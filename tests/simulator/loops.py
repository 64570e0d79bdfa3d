"""Event loops with virtual time: asyncio's and trio's own, which wait for a World.

When no task can run and no descriptor is readable, the world makes its next event happen, or
advances its clock to the next timer. So a test never waits for real. If nothing can ever happen,
the loop raises Stuck at once.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import trio
from trio._core import _run

from simulator.world import World

T = TypeVar("T")


class _Selector(selectors.EpollSelector):
    """asyncio's selector. It lets the world go on instead of waiting."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is not None and timeout <= 0:
            self._world.spin()
            return ready
        limit = None if timeout is None else self._world.now + timeout
        if not ready and self._world.threads.wait_readable(self.fileno(), limit):
            return super().select(0)
        while not ready:
            happened = self._world.step(limit)
            ready = super().select(0)
            if ready:
                self._world.overtake()
                ready = super().select(0)
            if not happened and not ready:
                if limit is None:
                    raise self._world.stuck("\n".join(map(str, asyncio.all_tasks())))
                break
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time."""

    def __init__(self, world: World) -> None:
        super().__init__(_Selector(world))
        self._world = world
        self._clock_resolution = 1e-12  # a timer fires at its time, not before

    def time(self) -> float:
        return self._world.now


class _Clock(trio.abc.Clock, trio.abc.Instrument):
    """A trio clock in virtual time. trio asks it before it waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._has_polled = False
        """True if trio has looked for readable descriptors, and no task has run since."""
        self._seen = 0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._world.now

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._has_polled = False

    def before_io_wait(self, timeout: float) -> None:
        if _run.GLOBAL_RUN_CONTEXT.runner.runq:
            self._world.spin()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0: trio only looks for readable descriptors. If it found none, go on first.

        If a task waits until all others wait, nothing goes on before. Trio then uses 0 itself.
        """
        runner: Any = _run.GLOBAL_RUN_CONTEXT.runner
        if runner.waiting_for_idle:
            return 1.0
        self._has_polled = not self._has_polled
        if not self._has_polled:
            limit = None if deadline == float("inf") else deadline
            self._announce_wait(runner)
            if runner.runq:
                return 0.0
            if self._world.threads.wait_readable(runner.io_manager._epoll.fileno(), limit):
                return 0.0
            happened = self._world.step(limit) or self._seen != self._world.steps
            self._seen = self._world.steps
            if happened:
                self._world.overtake()
            elif limit is None:
                raise self._world.stuck("every task")
        return 0.0

    def _announce_wait(self, runner: Any) -> None:
        """Tell the other instruments that trio waits. It will tell them a timeout of 0 only."""
        for instrument in list(runner.instruments["before_io_wait"]):
            if instrument is not self:
                instrument.before_io_wait(1.0)


def run(world: World, kind: str, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `body()` on a new loop of this kind, "asyncio" or "trio", in the world's time."""
    if kind == "trio":
        scheduler: Any = _run
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
        scheduler._r = random.Random(0)  # trio shuffles the tasks that can run
        clock = _Clock(world)
        return trio.run(body, clock=clock, instruments=[clock], strict_exception_groups=True)
    with asyncio.Runner(loop_factory=lambda: _Loop(world)) as runner:
        return runner.run(body())
