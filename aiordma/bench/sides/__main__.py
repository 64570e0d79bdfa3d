"""One side of a contender."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial

from aiordma.bench.sample import Sample
from aiordma.bench.sides import connections, idle, messages, streams, writers
from aiordma.bench.sides.running import run
from aiordma.bench.work import Work

Serve = Callable[[str, Callable[[int], None], Work], Coroutine[object, None, None]]
Drive = Callable[[str, int, Work], Coroutine[object, None, Sample]]

KINDS: dict[str, tuple[Serve, Drive]] = {
    "messages": (messages.serve, messages.drive),
    "connections": (connections.serve, connections.drive),
    "idle": (idle.serve, idle.drive),
    "streams": (streams.serve, streams.drive),
    "writers": (writers.RDMA.serve, writers.RDMA.drive),
    "tcp": (writers.TCP.serve, writers.TCP.drive),
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
