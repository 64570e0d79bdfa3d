"""cmtime and rstream of rdmacm-utils: their options and their output."""

from __future__ import annotations

import re

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample

_STEP = re.compile(r"^([a-z][a-z ]*?) *: +([\d.]+) *[\d.]+ *[\d.]+ *[\d.]+ *$", re.MULTILINE)
_FAILED = re.compile(r"^(event: .*|failure .*|RDMA_CM_EVENT_.*)$", re.MULTILINE)
NEEDED = {"create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect"}


def cmtime_command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """A command line. All connections are set up at once, step by step."""
    return ["cmtime", "-b" if is_server else "-s", host, "-p", str(port), "-c", str(work.count)]


def parse_cmtime(output: str, count: int) -> Sample:
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


def rstream_command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """A command line. For latency one transfer goes there and one back; for bandwidth all go
    there, and then as many back."""
    transfers, rounds = (1, work.count) if work.test == "latency" else (work.count, 1)
    numbers = ["-S", str(work.size), "-C", str(transfers), "-I", str(rounds)]
    return ["rstream", "-b" if is_server else "-s", host, "-p", str(port), *numbers, "-T", "b"]


def rstream_microseconds(output: str) -> float:
    """The last column: microseconds for each transfer.

    Raises:
        ValueError: it says nothing.
    """
    lines = [line.split() for line in output.splitlines() if line.startswith("custom")]
    if not lines:
        raise ValueError("there is no result line")
    return float(lines[-1][-1])


def parse_rstream_latency(output: str) -> Sample:
    """A round trip is two transfers. The mean: rstream times them all at once."""
    return Sample(2 * rstream_microseconds(output))


def parse_rstream_bandwidth(output: str, size: int) -> Sample:
    """MB/s of transfers of so many bytes."""
    return Sample(size / rstream_microseconds(output))
