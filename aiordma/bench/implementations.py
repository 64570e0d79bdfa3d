"""The implementations: one table of all that are compared, with the tests that each can do."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from aiordma.bench import perftest, pyverbs, rdmacm_utils
from aiordma.bench.environment import Environment
from aiordma.bench.plan import MANY, OPERATIONS, Work
from aiordma.bench.processes import Pair, run_pair
from aiordma.bench.sample import Sample
from aiordma.bench.worker_pairs import WorkerPairs

Tests = Mapping[str, tuple[str, ...]]
"""The operations by test."""
Run = Callable[[Work, Environment, WorkerPairs], Sample]


@dataclass(frozen=True)
class Implementation:
    """A way to do some of the tests."""

    name: str
    family: str
    """The family: one of PEERS, or "aiordma" itself."""
    tests: Tests
    """The tests that it can do, with their operations."""
    run: Run
    """Runs it once, in a pair of workers if it is in Python. Raises BenchError."""
    install: str = ""
    """The package to install if it is not installed."""
    is_installed: Callable[[], bool] = lambda: True
    loop: str = ""
    """The event loop that it runs on; "" for C programs."""

    def supports(self, work: Work) -> bool:
        """Return True if it can do this work."""
        return work.operation in self.tests.get(work.test, ())


# --- aiordma, and TCP in Python: aiordma.bench.workers ---


def _run_workers(
    kind: str, loop: str, polling: str, work: Work, environment: Environment, workers: WorkerPairs
) -> Sample:
    busy_poll = work.busy_poll if polling == "busy_poll" else 0.0
    own = replace(work, loop=loop, busy_poll=busy_poll, adaptive_poll=polling != "parked")
    return workers.run(kind, own, environment)


def _has_module(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _workers(name: str, kind: str, tests: Tests, loop: str, polling: str = "") -> Implementation:
    """Return an implementation that runs in aiordma.bench.workers.

    `polling` is "" for the default (adaptive polling), "busy_poll", or "parked": no polling.
    """
    needed = "aiohttp" if kind.startswith("http") else "ucxx" if "ucxx" in kind else loop
    return Implementation(
        f"{name} {polling}".rstrip(),
        "tcp" if kind.endswith(("tcp", "memory")) else "aiordma",
        tests,
        partial(_run_workers, kind, loop, polling),
        f"{'ucxx-cu12' if needed == 'ucxx' else needed} from PyPI",
        partial(_has_module, needed),
        loop,
    )


# --- other programs ---


def _run_perftest(
    events: bool, work: Work, environment: Environment, unused: WorkerPairs
) -> Sample:
    parse = {"latency": perftest.parse_latency, "rate": perftest.parse_rate}.get(
        work.test, perftest.parse_bandwidth
    )
    device, port = environment.device, environment.next_port()
    server, client = perftest.commands(work, device, port, environment.host, events)
    server = environment.server_command(server)
    return run_pair(Pair(server, lambda _: client, parse, port), environment.client_timeout)


def _perftest(program: str, tests: Tests, events: bool) -> Implementation:
    return Implementation(
        f"{program} -e" if events else program,
        "perftest",
        tests,
        partial(_run_perftest, events),
        "perftest",
        lambda: shutil.which(program) is not None,
    )


def _run_rstream(work: Work, environment: Environment, unused: WorkerPairs) -> Sample:
    host, port = environment.host, environment.next_port()
    server = environment.server_command(rdmacm_utils.rstream_command(work, port, host, True))
    client = rdmacm_utils.rstream_command(work, port, host, False)
    parse = rdmacm_utils.parse_rstream_latency
    if work.test == "bandwidth":
        parse = partial(rdmacm_utils.parse_rstream_bandwidth, size=work.size)
    return run_pair(Pair(server, lambda _: client, parse, port), environment.client_timeout)


def _run_cmtime(work: Work, environment: Environment, unused: WorkerPairs) -> Sample:
    host, port = environment.host, environment.next_port()
    server = environment.server_command(rdmacm_utils.cmtime_command(work, port, host, True))
    client = rdmacm_utils.cmtime_command(work, port, host, False)
    parse = partial(rdmacm_utils.parse_cmtime, count=work.count)
    pair = Pair(server, lambda _: client, parse, port, server_exits=False)
    return run_pair(pair, environment.client_timeout)


def _run_pyverbs(kind: str, work: Work, environment: Environment, unused: WorkerPairs) -> Sample:
    host, port = environment.host, environment.next_port()
    server = environment.server_command(pyverbs.command(work, "server", host, port, kind))
    client = pyverbs.command(work, "client", host, port, kind)
    return run_pair(Pair(server, lambda _: client, pyverbs.parse), environment.client_timeout)


def _pyverbs(kind: str) -> Implementation:
    return Implementation(
        "pyverbs" if kind == "blocking" else f"pyverbs {kind}",
        "pyverbs",
        {"latency": ("send",)},
        partial(_run_pyverbs, kind),
        "python3-pyverbs",
        lambda: pyverbs.interpreter() is not None,
    )


def _rdmacm_utility(name: str, tests: Tests, run: Run) -> Implementation:
    return Implementation(
        name, name, tests, run, "rdmacm-utils", lambda: shutil.which(name) is not None
    )


# --- the table ---

_MESSAGES: Tests = {"latency": ("send",), "rate": ("send",), "bandwidth": OPERATIONS}
_STREAM: Tests = {"latency": ("send",), "bandwidth": ("send",)}
_LATENCY: Tests = {"latency": ("send",)}
_RATES: Tests = {"rate": ("send",), "bandwidth": ("send",)}
_CONNECTIONS: Tests = {"connections": ("send",)}
_IDLE: Tests = {"idle": ("send",)}
_IDLE_STREAMS: Tests = {"idle": ("streams",)}
_ANSWERING: Tests = {"answering": ("send",)}
_RECONNECT: Tests = {"reconnect": ("send",)}
_OBJECTS: Tests = {"objects": ("read",)}
_HTTP: Tests = {"http": ("send",)}

IMPLEMENTATIONS = (
    _workers("aiordma asyncio", "messages", _MESSAGES, "asyncio"),
    _workers("aiordma asyncio", "messages", _MESSAGES, "asyncio", "busy_poll"),
    _workers("aiordma asyncio", "messages", _LATENCY, "asyncio", "parked"),
    _workers("aiordma uvloop", "messages", _MESSAGES, "uvloop"),
    _workers("aiordma uvloop", "messages", _LATENCY, "uvloop", "busy_poll"),
    _workers("aiordma uvloop", "messages", _LATENCY, "uvloop", "parked"),
    _workers("aiordma trio", "messages", _LATENCY, "trio"),
    _workers("aiordma trio", "messages", _LATENCY, "trio", "busy_poll"),
    _workers("aiordma asyncio", "connections", _CONNECTIONS, "asyncio"),
    _workers("aiordma uvloop", "connections", _CONNECTIONS, "uvloop"),
    _workers("aiordma trio", "connections", _CONNECTIONS, "trio"),
    _workers("aiordma asyncio", "idle", _IDLE, "asyncio"),
    _workers("aiordma asyncio", "answering", _ANSWERING, "asyncio"),
    _workers("aiordma asyncio", "reconnect", _RECONNECT, "asyncio"),
    _workers("aiordma ByteStream", "idle streams", _IDLE_STREAMS, "asyncio"),
    _workers("aiordma ByteStream", "streams", _STREAM, "asyncio"),
    _workers("aiordma reader, writer", "writers", _STREAM, "asyncio"),
    _workers("aiordma trio stream", "trio", _STREAM, "trio"),
    _workers("aiordma MessageStream", "objects", {**_LATENCY, **_OBJECTS}, "asyncio"),
    _workers("aiordma MessageStream", "objects", _OBJECTS, "asyncio", "busy_poll"),
    _workers("aiordma MessageStream bytes", "objects bytes", _OBJECTS, "asyncio"),
    _workers("TCP readexactly", "objects tcp", _OBJECTS, "asyncio"),
    _workers("ucxx over TCP", "objects ucxx tcp", _OBJECTS, "asyncio"),
    _workers("aiordma aiohttp", "http", _HTTP, "asyncio"),
    _workers("TCP asyncio", "tcp", {**_STREAM, **_RATES}, "asyncio"),
    _workers("TCP uvloop", "tcp", {**_STREAM, **_RATES}, "uvloop"),
    _workers("TCP trio", "trio tcp", _STREAM, "trio"),
    _workers("TCP aiohttp", "http tcp", _HTTP, "asyncio"),
    _workers("aiohttp in memory", "http memory", _HTTP, "asyncio"),
    _pyverbs("blocking"),
    _pyverbs("polling"),
    *(
        _perftest(program, tests, events)
        for events in (False, True)
        for program, tests in (
            ("ib_send_lat", _LATENCY),
            ("ib_send_bw", _RATES),
            ("ib_write_bw", {"bandwidth": ("write",)}),
            ("ib_read_bw", {"bandwidth": ("read",), **_OBJECTS}),
        )
        if not (events and program == "ib_write_bw")  # which has no events
    ),
    _rdmacm_utility("rstream", _STREAM, _run_rstream),
    _rdmacm_utility("cmtime", _CONNECTIONS, _run_cmtime),
)
"""All implementations. Within a test their names are unique."""


def reference(work: Work) -> str:
    """Return the implementation that the others are compared with in the table; "" for none."""
    if work.test in ("connections", "http"):
        return "cmtime" if work.test == "connections" else "TCP aiohttp"
    return "" if work.test in MANY else perftest.program(work)


def select(loops: tuple[str, ...], peers: tuple[str, ...]) -> list[Implementation]:
    """Return the implementations on these event loops: aiordma's, and those of these families."""
    return [
        implementation
        for implementation in IMPLEMENTATIONS
        if (implementation.loop or loops[0]) in loops
        and implementation.family in ("aiordma", *peers)
    ]
