"""The contenders: one table of who can do what, and how."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from aiordma.bench import perftest, pyverbs, rdmacm_utils
from aiordma.bench.environment import Place
from aiordma.bench.plan import OPERATIONS, Work
from aiordma.bench.processes import Pair, run_pair
from aiordma.bench.sample import Sample

ALL = {"latency": ("send",), "rate": ("send",), "bandwidth": OPERATIONS}
STREAM = {"latency": ("send",), "bandwidth": ("send",)}


@dataclass(frozen=True)
class Contender:
    """Somebody who can do some of the work."""

    name: str
    peer: str
    """Who it belongs to: "aiordma", or one of PEERS."""
    does: Mapping[str, tuple[str, ...]]
    """The tests, with the operations, that it takes part in."""
    run: Callable[[Work, Place], Sample]
    """Raises BenchError."""
    install: str = ""
    """What to install where it is not found."""
    found: Callable[[], bool] = lambda: True
    loop: str = ""
    """The event loop that it runs on."""

    def takes_part(self, work: Work) -> bool:
        """Whether it can do this."""
        return work.operation in self.does.get(work.test, ())


# --- the library, and TCP: sides of our own ---


def _run_side(kind: str, loop: str, polls: str, work: Work, place: Place) -> Sample:
    busy_poll = work.busy_poll if polls == "busy_poll" else 0.0
    own = replace(work, loop=loop, busy_poll=busy_poll, adaptive_poll=polls != "parked")

    def command(role: str, port: int) -> list[str]:
        module = [sys.executable, "-m", "aiordma.bench.workers"]
        return [*module, role, kind, place.host, str(port), own.pack()]

    pair = Pair(
        place.at_server(command("server", 0)),
        lambda port: command("client", port),
        Sample.from_json,
    )
    sample, output = run_pair(pair, place.limit)
    cpu = float(json.loads(output.splitlines()[-1])["cpu"])
    operations = work.idle if work.test == "idle" else work.count + work.warmup
    return replace(sample, server_cpu=cpu / operations * 1e6)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _side(
    name: str, kind: str, does: Mapping[str, tuple[str, ...]], loop: str, polls: str = ""
) -> Contender:
    """`polls` says when a wait polls before it parks; "": when it is used to short ones."""
    return Contender(
        f"{name} {polls}".rstrip(),
        "tcp" if kind == "tcp" else "aiordma",
        does,
        partial(_run_side, kind, loop, polls),
        f"pip install {loop}",
        partial(_has, loop),
        loop,
    )


def _of_test(name: str, kind: str, test: str, loop: str) -> Contender:
    return _side(name, kind, {test: ("send",)}, loop)


# --- programs of others ---


def _run_perftest(events: bool, work: Work, place: Place) -> Sample:
    parse = {"latency": perftest.parse_latency, "rate": perftest.parse_rate}.get(
        work.test, perftest.parse_bandwidth
    )
    port = place.next_port()
    server = place.at_server(perftest.command(work, place.device, port, None, events))
    client = perftest.command(work, place.device, port, place.host, events)
    return run_pair(Pair(server, lambda _: client, parse, port), place.limit)[0]


def _perftest(program: str, does: Mapping[str, tuple[str, ...]], events: bool) -> Contender:
    return Contender(
        f"{program} -e" if events else program,
        "perftest",
        does,
        partial(_run_perftest, events),
        "perftest",
        lambda: shutil.which(program) is not None,
    )


def _run_rstream(work: Work, place: Place) -> Sample:
    port = place.next_port()
    server = place.at_server(rdmacm_utils.rstream_command(work, port, place.host, True))
    client = rdmacm_utils.rstream_command(work, port, place.host, False)
    parse = rdmacm_utils.parse_rstream_latency
    if work.test == "bandwidth":
        parse = partial(rdmacm_utils.parse_rstream_bandwidth, size=work.size)
    return run_pair(Pair(server, lambda _: client, parse, port), place.limit)[0]


def _run_cmtime(work: Work, place: Place) -> Sample:
    port = place.next_port()
    server = place.at_server(rdmacm_utils.cmtime_command(work, port, place.host, True))
    client = rdmacm_utils.cmtime_command(work, port, place.host, False)
    parse = partial(rdmacm_utils.parse_cmtime, count=work.count)
    pair = Pair(server, lambda _: client, parse, port, goes_on=True)
    return run_pair(pair, place.limit)[0]


def _run_pyverbs(kind: str, work: Work, place: Place) -> Sample:
    port = place.next_port()
    server = place.at_server(pyverbs.command(work, "server", place.host, port, kind))
    client = pyverbs.command(work, "client", place.host, port, kind)
    return run_pair(Pair(server, lambda _: client, pyverbs.parse), place.limit)[0]


def _pyverbs(kind: str) -> Contender:
    return Contender(
        "pyverbs" if kind == "blocking" else f"pyverbs {kind}",
        "pyverbs",
        {"latency": ("send",)},
        partial(_run_pyverbs, kind),
        "python3-pyverbs",
        lambda: pyverbs.interpreter() is not None,
    )


def _utility(
    name: str, does: Mapping[str, tuple[str, ...]], run: Callable[[Work, Place], Sample]
) -> Contender:
    return Contender(name, name, does, run, "rdmacm-utils", lambda: shutil.which(name) is not None)


_LATENCY = {"latency": ("send",)}
_RATES = {"rate": ("send",), "bandwidth": ("send",)}

CONTENDERS = (
    _side("aiordma asyncio", "messages", ALL, "asyncio"),
    _side("aiordma asyncio", "messages", ALL, "asyncio", "busy_poll"),
    _side("aiordma asyncio", "messages", _LATENCY, "asyncio", "parked"),
    _side("aiordma uvloop", "messages", ALL, "uvloop"),
    _side("aiordma uvloop", "messages", _LATENCY, "uvloop", "busy_poll"),
    _side("aiordma uvloop", "messages", _LATENCY, "uvloop", "parked"),
    _side("aiordma trio", "messages", _LATENCY, "trio"),
    _side("aiordma trio", "messages", _LATENCY, "trio", "busy_poll"),
    _of_test("aiordma asyncio", "connections", "connections", "asyncio"),
    _of_test("aiordma uvloop", "connections", "connections", "uvloop"),
    _of_test("aiordma trio", "connections", "connections", "trio"),
    _of_test("aiordma asyncio", "idle", "idle", "asyncio"),
    _side("aiordma ByteStream", "streams", STREAM, "asyncio"),
    _side("aiordma reader, writer", "writers", STREAM, "asyncio"),
    _side("TCP asyncio", "tcp", {**STREAM, **_RATES}, "asyncio"),
    _side("TCP uvloop", "tcp", {**STREAM, **_RATES}, "uvloop"),
    _pyverbs("blocking"),
    _pyverbs("polling"),
    *(
        _perftest(program, does, events)
        for events in (False, True)
        for program, does in (
            ("ib_send_lat", _LATENCY),
            ("ib_send_bw", _RATES),
            ("ib_write_bw", {"bandwidth": ("write",)}),
            ("ib_read_bw", {"bandwidth": ("read",)}),
        )
        if not (events and program == "ib_write_bw")  # which has no events
    ),
    _utility("rstream", STREAM, _run_rstream),
    _utility("cmtime", {"connections": ("send",)}, _run_cmtime),
)
"""Everybody. A name stands once for each test."""


def reference(work: Work) -> str:
    """The contender that all others of a test are compared with."""
    if work.test == "connections":
        return "cmtime"
    return "" if work.test == "idle" else perftest.program(work)


def chosen(loops: tuple[str, ...], peers: tuple[str, ...]) -> list[Contender]:
    """Those on these event loops, and of these peers beside aiordma."""
    return [
        contender
        for contender in CONTENDERS
        if (contender.loop or loops[0]) in loops and contender.peer in ("aiordma", *peers)
    ]
