"""cmtime of rdmacm-utils: how long the steps of connecting take, for all connections at once."""

from __future__ import annotations

import re

from aiordma.bench.sample import Sample
from aiordma.bench.work import Work

_STEP = re.compile(r"^([a-z][a-z ]*?) *: +([\d.]+) *[\d.]+ *[\d.]+ *[\d.]+ *$", re.MULTILINE)
_FAILED = re.compile(r"^(event: .*|failure .*|RDMA_CM_EVENT_.*)$", re.MULTILINE)
NEEDED = {"create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect"}


def command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """A command line. All connections are set up at once, step by step."""
    return ["cmtime", "-b" if is_server else "-s", host, "-p", str(port), "-c", str(work.count)]


def parse(output: str, count: int) -> Sample:
    """What the client says: milliseconds for each step; all of them make the rate.

    Raises:
        ValueError: a connection failed, or it says nothing.
    """
    failed = _FAILED.search(output)
    if failed:
        raise ValueError(failed[0])
    steps = {name: float(total) for name, total in _STEP.findall(output)}
    if not steps.keys() >= NEEDED:
        raise ValueError("there is no table of steps")
    details = {f"{name.replace(' ', '_')}_ms": total for name, total in steps.items()}
    return Sample(count / sum(steps.values()) * 1e3, details=details)
