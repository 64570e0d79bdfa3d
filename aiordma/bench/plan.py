"""The plan: which pieces of work a command line asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from aiordma.bench.contenders import LOOPS, OPERATIONS, PEERS
from aiordma.bench.work import TESTS, Work

LATENCY_SIZES = (64, 4096)
BANDWIDTH_SIZES = (4096, 65536, 1048576)
RATE_SIZE = 64
BANDWIDTH_BYTES = 32 << 20
BANDWIDTH_FEWEST = 64


@dataclass(frozen=True)
class Plan:
    """What to run. `sizes` and `count` stand for the defaults of each test when they are empty."""

    tests: tuple[str, ...] = tuple(TESTS)
    sizes: tuple[int, ...] = ()
    operations: tuple[str, ...] = OPERATIONS
    loops: tuple[str, ...] = LOOPS
    peers: tuple[str, ...] = PEERS
    busy_poll: float = 0.001
    rounds: int = 5
    count: int | None = None
    depth: int = 64
    concurrency: int = 32
    idle: int = 2000
    quick: bool = False

    def works(self) -> Iterator[Work]:
        """The pieces of work, test after test."""
        for test in self.tests:
            yield from getattr(self, f"_{test}")()

    def _work(self, test: str, count: int, quick: int, warmup: int) -> Work:
        """A piece of work of `count` operations, or `quick` when it must be quick."""
        chosen = self.count or (quick if self.quick else count)
        return Work(
            test,
            count=chosen,
            warmup=min(warmup, chosen),
            depth=self.depth,
            concurrency=self.concurrency,
            busy_poll=self.busy_poll,
        )

    def _sizes(self, default: tuple[int, ...]) -> tuple[int, ...]:
        return self.sizes or (default[:1] if self.quick else default)

    def _latency(self) -> Iterator[Work]:
        for size in self._sizes(LATENCY_SIZES):
            yield replace(self._work("latency", 1000, 50, 100), size=size)

    def _rate(self) -> Iterator[Work]:
        yield replace(self._work("rate", 5000, 200, 500), size=RATE_SIZE)

    def _bandwidth(self) -> Iterator[Work]:
        for operation in self.operations:
            for size in self._sizes(BANDWIDTH_SIZES):
                count = max(BANDWIDTH_FEWEST, BANDWIDTH_BYTES // size)
                work = self._work("bandwidth", count, 16, 16)
                yield replace(work, size=size, operation=operation)

    def _connections(self) -> Iterator[Work]:
        yield self._work("connections", 200, 20, 20)

    def _idle(self) -> Iterator[Work]:
        idle = min(self.idle, 20) if self.quick else self.idle
        yield replace(self._work("idle", 1000, 50, 100), idle=idle)
