"""Do the work that standard input describes, as a server or as a client of an implementation.

Each line is a JSON list: "server" or "client", the kind, the server's address, its port (0 for a
server, which chooses one), and the fields of a Work. A server prints {"port": N} when it listens,
and {"cpu": SECONDS} when it has served its client. A client prints its sample. The process exits at
the end of its input.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import resource
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers import (
    connections,
    idle,
    messages,
    objects,
    reconnect,
    streams,
    ucxx_objects,
)
from aiordma.bench.workers.lines import print_line, print_port

T = TypeVar("T")
Serve = Callable[[str, Callable[[int], None], Work], Coroutine[object, None, None]]
Measure = Callable[[str, int, Work], Coroutine[object, None, Sample]]

KINDS: dict[str, tuple[Serve, Measure]] = {
    "messages": (messages.serve, messages.measure),
    "connections": (connections.serve_connections, connections.measure_connections),
    "idle": (idle.CONNECTIONS.serve, idle.CONNECTIONS.measure_memory),
    "idle streams": (idle.STREAMS.serve, idle.STREAMS.measure_memory),
    "answering": (idle.CONNECTIONS.serve, idle.CONNECTIONS.measure_answering),
    "reconnect": (reconnect.serve, reconnect.measure),
    "streams": (streams.serve, streams.measure),
    "objects": (objects.serve, objects.measure),
    "objects bytes": (objects.serve, objects.measure_bytes),
    "objects tcp": (objects.serve_tcp, objects.measure_tcp),
    "objects ucxx tcp": (ucxx_objects.serve, ucxx_objects.measure),
    "writers": (streams.RDMA_WRITERS.serve, streams.RDMA_WRITERS.measure),
    "tcp": (streams.TCP_WRITERS.serve, streams.TCP_WRITERS.measure),
    "trio": (streams.serve_trio, streams.measure_trio),
    "trio tcp": (streams.serve_trio_tcp, streams.measure_trio_tcp),
}
"""The coroutine functions of server and client, by kind."""


def kind_functions(kind: str) -> tuple[Serve, Measure]:
    """Return the functions of a kind. The module of the kinds of HTTP needs aiohttp."""
    if kind.startswith("http"):
        http = importlib.import_module("aiordma.bench.workers.http")
        kinds: dict[str, tuple[Serve, Measure]] = {
            "http": (http.serve, http.measure),
            "http tcp": (http.serve_tcp, http.measure_tcp),
            "http memory": (http.serve_tcp, http.measure_in_memory),
        }
        return kinds[kind]
    return KINDS[kind]


def run(loop: str, main: Callable[[], Coroutine[object, None, T]]) -> T:
    """Run `main()` on asyncio, uvloop or trio with their default settings; return its result."""
    if loop == "trio":
        result: T = importlib.import_module("trio").run(main)
        return result
    factory = importlib.import_module("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def processor_time() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


def do(role: str, kind: str, host: str, port: int, work: Work) -> None:
    """Run the server or the client of this kind in a new event loop, until it has finished."""
    serve, measure = kind_functions(kind)
    importlib.import_module(work.loop)  # which takes processor time
    gc.collect()  # what the work before has left
    if role == "client":
        print_line(run(work.loop, partial(measure, host, port, work)).to_json())
        return
    begin = processor_time()
    run(work.loop, partial(serve, host, print_port, work))
    print_line(json.dumps({"cpu": processor_time() - begin}))


if __name__ == "__main__":
    for line in sys.stdin:
        role, kind, host, port, fields = json.loads(line)
        do(role, kind, host, port, Work(**fields))
