"""The plan of a run: the tests, the work that each consists of, and the user's choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

OPERATIONS = ("send", "write", "read")
LOOPS = ("asyncio", "uvloop", "trio")
PEERS = ("tcp", "pyverbs", "perftest", "rstream", "cmtime")
"""The families of implementations that aiordma is compared with."""


@dataclass(frozen=True, slots=True)
class Test:
    """The unit of a test's values, and their direction."""

    unit: str
    lower_is_better: bool


TESTS = {
    "latency": Test("us", lower_is_better=True),  # of a round trip
    "rate": Test("messages/s", lower_is_better=False),  # in one direction, one after another
    "bandwidth": Test("MB/s", lower_is_better=False),  # of many operations in flight
    "objects": Test("MB/s", lower_is_better=False),  # of messages that are received whole
    "http": Test("requests/s", lower_is_better=False),  # of 1 KiB, answered with 1 KiB
    "connections": Test("connections/s", lower_is_better=False),  # set up and torn down
    "idle": Test("KiB/connection", lower_is_better=True),  # memory of the server's process
    "answering": Test("us", lower_is_better=True),  # of a round trip, among many others
    "reconnect": Test("connections/s", lower_is_better=False),  # after the death of the server
}
"""The tests by name, in the order in which they run. A megabyte is 10^6 bytes, a KiB 1024."""


MANY = ("idle", "answering", "reconnect")
"""The tests of `Work.idle` connections. Only aiordma does them."""

MANY_WARMUP = 100
"""The round trips of the active connection before it is timed, in `idle` and `answering`."""

TURN = 0.1
"""Seconds: the length of a turn of `idle` and `answering`. The speed of some machines changes
within seconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a server and its client in a run. Sizes are in bytes, times in seconds."""

    test: str
    operation: str = "send"
    size: int = 64
    count: int = 1000
    """The number of operations, messages, round trips or connections that are timed."""
    warmup: int = 100
    """The number of operations before them that are not timed."""
    runs: int = 1
    """The number of runs in each round. The best one counts."""
    depth: int = 32
    """The number of operations in flight, in `bandwidth`."""
    concurrency: int = 32
    """The number of connections that are set up concurrently, or that send requests of HTTP."""
    idle: int = 2000
    """The number of connections in `idle` (beside the active one), `answering` and `reconnect`."""
    turns: int = 0
    """The number of turns in which an active connection is timed alone, and among the others, in
    `idle` and `answering`."""
    loop: str = "asyncio"
    busy_poll: float = 0.0
    adaptive_poll: bool = True

    @property
    def key(self) -> str:
        """The name in a report: `latency/64`, `bandwidth/write/4096`, `connections`."""
        parts = {
            "latency": [str(self.size)],
            "rate": [str(self.size)],
            "bandwidth": [self.operation, str(self.size)],
            "objects": [str(self.size)],
            "http": [str(self.concurrency)],
            "idle": ["streams"] if self.operation == "streams" else [],
        }
        return "/".join([self.test, *parts.get(self.test, [])])

    @property
    def title(self) -> str:
        """The heading in a table."""
        parts = {
            "latency": f"round trips of {self.size} bytes",
            "rate": f"messages of {self.size} bytes",
            "bandwidth": f"{self.operation} of {self.size} bytes",
            "objects": f"of {self.size} bytes",
            "http": f"requests, connections: {self.concurrency}",
            "connections": f"{self.count}, {self.concurrency} at once",
            "idle": f"{self.idle} {'streams' if self.operation == 'streams' else 'connections'}",
            "answering": f"{self.idle} connections, one round trip each in {self.turns * TURN:g} s",
            "reconnect": f"{self.idle} clients at once, after the server was killed",
        }
        return f"{self.test}: {parts[self.test]}"


LATENCY_SIZES = (64, 4096)
BANDWIDTH_SIZES = (4096, 65536, 1048576)
RATE_SIZE = 64
HTTP_CONNECTIONS = (1, 50)
OBJECT_SIZES = (1 << 20, 1 << 26)
OBJECT_BYTES = 1 << 27
MAX_OBJECTS = 32
MIN_OBJECTS = 5  # perftest does no fewer
BANDWIDTH_BYTES = 1 << 26
MIN_BANDWIDTH_OPERATIONS = 64
LONG_BUSY_POLL = 0.1
"""Seconds: the shortest `busy_poll` of `bandwidth` and `objects`, longer than 1 MiB takes on an
emulated device."""
RUNS = 6
"""The runs in each round, except of `objects`, `connections` and MANY. They are short, because the
speed of some machines changes within seconds."""
LONG_RUNS = 3
"""The runs in each round of `objects` and `connections`. They are longer: an object of 64 MiB takes
seconds on an emulated device, and fewer connections in each run would be set up more slowly."""


@dataclass(frozen=True)
class Plan:
    """The user's choices. An empty `sizes` and a `count` of None mean each test's defaults."""

    tests: tuple[str, ...] = tuple(TESTS)
    sizes: tuple[int, ...] = ()
    operations: tuple[str, ...] = OPERATIONS
    loops: tuple[str, ...] = LOOPS
    peers: tuple[str, ...] = PEERS
    busy_poll: float = 0.001
    rounds: int = 5
    count: int | None = None
    depth: int = 32
    concurrency: int = 32
    idle: int = 2000
    quick: bool = False
    goals: bool = False
    """True to run only what the goals compare."""

    def works(self) -> Iterator[Work]:
        """Yield the work of each test and, within it, of each operation and size."""
        for test in self.tests:
            yield from getattr(self, f"_{test}")()

    def _work(self, test: str, count: int, quick_count: int, warmup: int, runs: int = 1) -> Work:
        """Return work of as many operations as the user chose, or by default `count`.

        A quick plan has `quick_count` of them by default, and one run in each round.
        """
        chosen = self.count or (quick_count if self.quick else count)
        return Work(
            test,
            count=chosen,
            warmup=min(warmup, chosen),
            runs=1 if self.quick else runs,
            depth=self.depth,
            concurrency=self.concurrency,
            busy_poll=self.busy_poll,
        )

    def _sizes(self, default: tuple[int, ...]) -> tuple[int, ...]:
        return self.sizes or (default[:1] if self.quick else default)

    def _long_work(self, test: str, count: int, warmup: int, runs: int) -> Work:
        """Return work of operations that take long: with a long `busy_poll`."""
        busy_poll = max(self.busy_poll, LONG_BUSY_POLL)
        return replace(self._work(test, count, 16, warmup, runs), busy_poll=busy_poll)

    def _latency(self) -> Iterator[Work]:
        for size in self._sizes(LATENCY_SIZES):
            yield replace(self._work("latency", 1000, 50, 100, RUNS), size=size)

    def _rate(self) -> Iterator[Work]:
        yield replace(self._work("rate", 10_000, 200, 500, RUNS), size=RATE_SIZE)

    def _bandwidth(self) -> Iterator[Work]:
        for operation in self.operations:
            for size in self._sizes(BANDWIDTH_SIZES):
                count = max(MIN_BANDWIDTH_OPERATIONS, BANDWIDTH_BYTES // size)
                work = self._long_work("bandwidth", count, 16, RUNS)
                yield replace(work, size=size, operation=operation)

    def _objects(self) -> Iterator[Work]:
        for size in OBJECT_SIZES[:1] if self.quick else OBJECT_SIZES:
            count = max(MIN_OBJECTS, min(MAX_OBJECTS, OBJECT_BYTES // size))
            work = self._long_work("objects", count, 2, LONG_RUNS)
            yield replace(work, size=size, operation="read")

    def _http(self) -> Iterator[Work]:
        for connections in HTTP_CONNECTIONS[:1] if self.quick else HTTP_CONNECTIONS:
            yield replace(self._work("http", 300, 20, 50, RUNS), concurrency=connections)

    def _connections(self) -> Iterator[Work]:
        yield self._work("connections", 500, 20, 20, LONG_RUNS)

    def _idle(self) -> Iterator[Work]:
        for operation in ("send", "streams"):
            yield replace(self._many_work("idle", 100), operation=operation)

    def _answering(self) -> Iterator[Work]:
        yield self._many_work("answering", 300)

    def _reconnect(self) -> Iterator[Work]:
        yield self._many_work("reconnect", 0)

    def _many_work(self, test: str, turns: int) -> Work:
        work = replace(self._work(test, 1, 1, 1), idle=self.idle, turns=turns, warmup=MANY_WARMUP)
        if self.quick:
            return replace(work, idle=min(self.idle, 20), turns=min(turns, 10), warmup=1)
        return work
