"""Simulation: the devices, and a program that uses them."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from simulator import world as worlds
from simulator.cm import Channel, ConnectionManager, Event, Id
from simulator.network import Network
from simulator.verbs import (
    Channel as CompletionChannel,
)
from simulator.verbs import (
    CompletionQueue,
    Device,
    Domain,
    QueuePair,
    Region,
    SharedReceives,
    Window,
)
from simulator.world import RandomSchedule, World

T = TypeVar("T")

_KINDS = (
    Channel, Event, Id, CompletionChannel, CompletionQueue, Domain, QueuePair, Region,
    SharedReceives, Window,
)  # fmt: skip


class Simulation:
    """Two connected devices of a kind, and one program that has both.

    run() runs the program. Afterwards nothing may be left of what it has made.
    """

    def __init__(self, *, seed: int | None = None, iwarp: bool = False) -> None:
        schedule = None if seed is None else RandomSchedule(random.Random(seed))
        self.world = World(schedule)
        self.network = Network(self.world)
        self.near = Device("sim0", "10.0.0.1", iwarp=iwarp)
        self.far = Device("sim1", "10.0.0.2", iwarp=iwarp)
        self.cm = ConnectionManager(self.world, [self.near, self.far])

    def run(self, body: Callable[[], Coroutine[Any, Any, T]], kind: str = "asyncio") -> T:
        """Run `body()` on a new loop of this kind, "asyncio" or "trio". Return its result.

        Raises:
            AssertionError: the program has done what it must not do, or left something behind.
        """
        from simulator import loops
        from simulator.threads import simulated_threads

        worlds.enter(self.world)
        gc.freeze()  # so that collecting garbage examines only what this program makes
        try:
            with simulated_threads(self.world) as threads:
                result = loops.run(self.world, kind, body)
                gc.collect()
                for loop, call in threads.guarded:
                    if loop.is_closed():
                        call.run()
                self.world.settle(60.0)
                assert not threads.alive, f"{threads.alive} jobs of worker threads are not done"
        finally:
            gc.unfreeze()
            worlds.enter(None)
        self.check()
        return result

    def queue_pairs(self) -> list[QueuePair]:
        """Return the queue pairs that exist."""
        return self.world.all(QueuePair)

    def check(self) -> None:
        """Check what must hold at the end.

        Raises:
            AssertionError: a rule was violated, or an object was not destroyed.
        """
        assert not self.world.violations, "\n".join(self.world.violations)
        left = self.left()
        assert not left, f"not destroyed: {left}"

    def left(self) -> dict[str, int]:
        """Return the number of objects of each kind that exist."""
        counts = {kind.__qualname__: len(self.world.all(kind)) for kind in _KINDS}
        return {name: count for name, count in counts.items() if count}
