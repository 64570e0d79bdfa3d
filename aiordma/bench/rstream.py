"""rstream of rdmacm-utils: rsockets, blocking, there and back."""

from __future__ import annotations

from aiordma.bench.sample import Sample
from aiordma.bench.work import Work


def command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """A command line. For latency one transfer goes there and one back; for bandwidth all go
    there, and then as many back."""
    transfers, rounds = (1, work.count) if work.test == "latency" else (work.count, 1)
    numbers = ["-S", str(work.size), "-C", str(transfers), "-I", str(rounds)]
    return ["rstream", "-b" if is_server else "-s", host, "-p", str(port), *numbers, "-T", "b"]


def microseconds(output: str) -> float:
    """The last column: microseconds for each transfer.

    Raises:
        ValueError: it says nothing.
    """
    lines = [line.split() for line in output.splitlines() if line.startswith("custom")]
    if not lines:
        raise ValueError("there is no result line")
    return float(lines[-1][-1])


def parse_latency(output: str) -> Sample:
    """A round trip is two transfers. The mean: rstream times them all at once."""
    return Sample(2 * microseconds(output))


def parse_bandwidth(output: str, size: int) -> Sample:
    """MB/s of transfers of so many bytes."""
    return Sample(size / microseconds(output))
