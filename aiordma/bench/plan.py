"""The plan: which pieces of work a command line asks for."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

OPERATIONS = ("send", "write", "read")
LOOPS = ("asyncio", "uvloop", "trio")
PEERS = ("tcp", "pyverbs", "perftest", "rstream", "cmtime")


@dataclass(frozen=True, slots=True)
class Test:
    """What a test measures."""

    unit: str
    lower_is_better: bool
    question: str


TESTS = {
    "latency": Test("us", True, "a round trip"),
    "rate": Test("messages/s", False, "messages one way, one after another"),
    "bandwidth": Test("MB/s", False, "many operations at once"),
    "connections": Test("connections/s", False, "connections set up and torn down"),
    "idle": Test("KiB/connection", True, "memory of the server's process for idle connections"),
}
"""The tests by name, in the order in which they run. A megabyte is 10^6 bytes, a KiB 1024."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the two processes of a contender do. Sizes are bytes, times seconds."""

    test: str
    operation: str = "send"
    size: int = 64
    count: int = 1000
    """Operations, messages, round trips or connections that are timed."""
    warmup: int = 100
    """As many before, that are not."""
    depth: int = 64
    """Operations on their way at once, in `bandwidth`."""
    concurrency: int = 32
    """Connections that are set up at once."""
    idle: int = 2000
    """Connections that do nothing, in `idle`."""
    loop: str = "asyncio"
    busy_poll: float = 0.0
    adaptive_poll: bool = True

    @property
    def key(self) -> str:
        """What names it in a report: `latency/64`, `bandwidth/write/4096`, `connections`."""
        parts = {
            "latency": [str(self.size)],
            "rate": [str(self.size)],
            "bandwidth": [self.operation, str(self.size)],
        }
        return "/".join([self.test, *parts.get(self.test, [])])

    @property
    def title(self) -> str:
        """The same for people."""
        parts = {
            "latency": f"round trips of {self.size} bytes",
            "rate": f"messages of {self.size} bytes",
            "bandwidth": f"{self.operation} of {self.size} bytes",
            "connections": f"{self.count}, {self.concurrency} at once",
            "idle": f"{self.idle} connections",
        }
        return f"{self.test}: {parts[self.test]}"

    def pack(self) -> str:
        """JSON in base64: a word that passes through every shell, ssh's too, as it is."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def unpack(cls, word: str) -> Work:
        """What pack() made."""
        return cls(**json.loads(base64.urlsafe_b64decode(word)))


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
