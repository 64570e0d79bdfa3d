"""perftest: ib_send_lat, ib_send_bw, ib_write_bw and ib_read_bw; their options and their output."""

from __future__ import annotations

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample

MEBIBYTE = 1 << 20
FEWEST = 5
"""perftest makes no fewer iterations."""


def program(work: Work) -> str:
    """Which of its programs does this work."""
    if work.test == "latency":
        return "ib_send_lat"
    return f"ib_{work.operation}_bw"


def command(work: Work, device: str, port: int, host: str | None, events: bool) -> list[str]:
    """A command line: the client's with `host`, the server's without.

    -R: by rdma_cm, as aiordma connects. -F: go on though the clock's frequency changes. Queue
    depths are perftest's own, of 128 sends and 512 receives.
    """
    count = str(max(FEWEST, work.count))
    options = ["-R", "-F", "-d", device, "-p", str(port), "-s", str(work.size), "-n", count]
    return [program(work), *options, *(["-e"] if events else []), *([host] if host else [])]


def parse_latency(output: str) -> Sample:
    """What ib_send_lat says: microseconds for half a round trip. The sample has whole ones.

    Raises:
        ValueError: it says nothing.
    """
    _, row = _table(output)
    low, high, typical, _, _, p99, p999 = (2 * number for number in row[2:9])
    percentiles = {"min": low, "50": typical, "99": p99, "99.9": p999, "max": high}
    return Sample(typical, percentiles)


def parse_rate(output: str) -> Sample:
    """What ib_send_bw says of messages, in messages a second. Raises: as parse_latency()."""
    return Sample(_table(output)[1][4] * 1e6)


def parse_bandwidth(output: str) -> Sample:
    """The average bandwidth in MB/s. Raises: as parse_latency().

    What perftest calls MB, and in later versions MiB, is 2^20 bytes.
    """
    header, row = _table(output)
    unit = 125.0 if "BW average[Gb/sec]" in header else MEBIBYTE / 1e6
    return Sample(row[3] * unit)


def _table(output: str) -> tuple[str, list[float]]:
    """The header of its table, and the numbers of the first line below it."""
    lines = iter(output.splitlines())
    for header in lines:
        if header.lstrip().startswith("#bytes"):
            row = next((line for line in lines if line.strip()), "").split()
            wanted = 9 if "t_typical" in header else 5
            if len(row) < wanted:
                break
            return header, [float(number) for number in row]
    raise ValueError("there is no result line")
