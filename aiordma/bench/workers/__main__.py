"""One side of a contender."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample
from aiordma.bench.workers import connections, messages, streams

T = TypeVar("T")


def run(loop: str, main: Callable[[], Coroutine[object, None, T]]) -> T:
    """Run `main()` on asyncio, uvloop or trio, set up as their users set them up."""
    if loop == "trio":
        found: T = importlib.import_module("trio").run(main)
        return found
    factory = importlib.import_module("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


Serve = Callable[[str, Callable[[int], None], Work], Coroutine[object, None, None]]
Drive = Callable[[str, int, Work], Coroutine[object, None, Sample]]

KINDS: dict[str, tuple[Serve, Drive]] = {
    "messages": (messages.serve, messages.drive),
    "connections": (connections.serve_connections, connections.drive_connections),
    "idle": (connections.serve_idle, connections.drive_idle),
    "streams": (streams.serve, streams.drive),
    "writers": (streams.RDMA.serve, streams.RDMA.drive),
    "tcp": (streams.TCP.serve, streams.TCP.drive),
}


def say(line: str) -> None:
    """Print to whoever started this process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def announce(port: int) -> None:
    """Say where this server listens."""
    say(json.dumps({"port": port}))


def main(role: str, kind: str, host: str, port: str, word: str) -> None:
    """Run one side."""
    serve, drive = KINDS[kind]
    work = Work.unpack(word)
    if role == "client":
        say(run(work.loop, partial(drive, host, int(port), work)).to_json())
        return
    begin = time.process_time()
    run(work.loop, partial(serve, host, announce, work))
    say(json.dumps({"cpu": time.process_time() - begin}))


if __name__ == "__main__":
    main(*sys.argv[1:])
