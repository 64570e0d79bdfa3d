"""perftest: command lines and output of ib_send_lat, ib_send_bw, ib_write_bw and ib_read_bw."""

from __future__ import annotations

import functools
import subprocess

from aiordma.bench.errors import BenchError
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample

MEBIBYTE = 1 << 20
IPV6_OPTION = "--ipv6-addr"
MIN_ITERATIONS = 5
"""The minimum of perftest."""


def program(work: Work) -> str:
    """Return the name of the program that does this work."""
    if work.test == "latency":
        return "ib_send_lat"
    return f"ib_{work.operation}_bw"


def commands(
    work: Work, device: str, port: int, host: str, events: bool
) -> tuple[list[str], list[str]]:
    """Return the command lines of the server and of the client.

    -R: connect by rdma_cm, as aiordma does. -F: run although the processor's clock frequency
    changes. The queue depths are perftest's defaults, 128 sends and 512 receives.

    Raises:
        BenchError: this version of perftest does not take the address.
    """
    name, count = program(work), str(max(MIN_ITERATIONS, work.count))
    server = [name, "-R", "-F", "-d", device, "-p", str(port), "-s", str(work.size), "-n", count]
    if events:
        server.append("-e")
    if ":" in host:
        if IPV6_OPTION not in _usage(name):
            raise BenchError(f"this version of {name} knows no IPv6 addresses")
        server.append(IPV6_OPTION)
    return server, [*server, host]


@functools.cache
def _usage(name: str) -> str:
    """Return the options that this version of a program prints."""
    shown = subprocess.run([name, "--help"], capture_output=True, text=True, check=False)
    return shown.stdout + shown.stderr


def parse_latency(output: str) -> Sample:
    """Return the latency of whole round trips. ib_send_lat prints microseconds for half of one.

    Raises:
        ValueError: the output has no result.
    """
    _, row = _table(output)
    low, high, typical, _, _, p99, p999 = (2 * number for number in row[2:9])
    percentiles = {"min": low, "50": typical, "99": p99, "99.9": p999, "max": high}
    return Sample(typical, percentiles)


def parse_rate(output: str) -> Sample:
    """Return the message rate of ib_send_bw in messages per second.

    Raises:
        ValueError: the output has no result.
    """
    return Sample(_table(output)[1][4] * 1e6)


def parse_bandwidth(output: str) -> Sample:
    """Return the average bandwidth in MB/s.

    The unit that perftest calls MB, and in later versions MiB, is 2^20 bytes.

    Raises:
        ValueError: the output has no result.
    """
    header, row = _table(output)
    unit = 125.0 if "BW average[Gb/sec]" in header else MEBIBYTE / 1e6
    return Sample(row[3] * unit)


def _table(output: str) -> tuple[str, list[float]]:
    """Return the header of the table, and the numbers of the first line below it."""
    lines = iter(output.splitlines())
    for header in lines:
        if header.lstrip().startswith("#bytes"):
            row = next((line for line in lines if line.strip()), "").split()
            wanted = 9 if "t_typical" in header else 5
            if len(row) < wanted:
                break
            return header, [float(number) for number in row]
    raise ValueError("there is no result line")
