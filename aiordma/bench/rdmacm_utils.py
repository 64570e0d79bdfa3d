"""rdmacm-utils: command lines and output of cmtime and rstream."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample

# --- cmtime: the time of each step of connecting, for all connections together ---

_STEP = re.compile(r"^([a-z][a-z ]*?) *: +([\d.]+) *[\d.]+ *[\d.]+ *[\d.]+ *$", re.MULTILINE)
# rdma-core 56 and 65: the mean and the sum of a step, in us, then the times of one connection.
_NEWER_STEP = re.compile(r"^([a-z][a-z ]*?) +\d+ +(\d+)(?: +\d+){4} *$", re.MULTILINE)
_FAILURE = re.compile(r"^(event: .*|failure .*|RDMA_CM_EVENT_.*)$", re.MULTILINE)
SERVER_QPN = "100000"
REQUIRED_STEPS = {
    "create id",
    "resolve addr",
    "resolve route",
    "create qp",
    "connect",
    "disconnect",
}


def cmtime_command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """Return a command line. cmtime sets up all connections together, step by step.

    Newer versions set them up once more, with made-up numbers of queue pairs. Those of the two
    sides must not be the same: on one machine the connection manager would take them for stale.
    """
    usage = _cmtime_usage()
    role = ["-b" if is_server else "-s", host]
    if "controller_address" in usage:  # rdma-core 65: one of the two controls the steps
        role = ["-b", host, "-C", host, *(["-L"] if is_server else [])]
    numbers = ["-q", SERVER_QPN] if is_server and "base_qpn" in usage else []
    return ["cmtime", *role, "-p", str(port), "-c", str(work.count), *numbers]


@functools.cache
def _cmtime_usage() -> str:
    """Return the options that this version of cmtime prints; "" if it is not installed."""
    if shutil.which("cmtime") is None:
        return ""
    shown = subprocess.run(["cmtime", "-h"], capture_output=True, text=True, check=False)
    return shown.stdout + shown.stderr


def parse_cmtime(output: str, count: int) -> Sample:
    """Return the connection rate: the connections divided by the sum of all steps' times.

    The client prints the milliseconds of each step; they become the sample's details.

    Raises:
        ValueError: a connection failed, or the output has no table.
    """
    failure = _FAILURE.search(output)
    if failure:
        raise ValueError(failure[0])
    steps = {name: float(total) for name, total in _STEP.findall(output)} or _newer_steps(output)
    if not steps.keys() >= REQUIRED_STEPS:
        raise ValueError("there is no table of steps")
    details = {f"{name.replace(' ', '_')}_ms": total for name, total in steps.items()}
    return Sample(count / sum(steps.values()) * 1e3, details=details)


def _newer_steps(output: str) -> dict[str, float]:
    """Return the milliseconds of each step of the first test, which has queue pairs."""
    found = dict(_NEWER_STEP.findall(output.partition("no QPs")[0]))
    found.pop("full connect", None)  # the sum of the others
    if "cm connect" in found:
        found["connect"] = found.pop("cm connect")
    return {name: int(total) / 1e3 for name, total in found.items() if total != "0"}


# --- rstream: blocking rsockets ---

STREAM_BUFFER = 4 << 20
"""The size in bytes of the buffers of byte streams, for bandwidth: a sender waits less often for
the peer to read."""


def rstream_command(work: Work, port: int, host: str, is_server: bool) -> list[str]:
    """Return a command line.

    For latency, one transfer is sent and one comes back, again and again. For bandwidth, half of
    the transfers are sent, and then the other half comes back, with the buffers of aiordma's
    streams.
    """
    transfers, rounds, buffers = 1, work.count, list[str]()
    if work.test == "bandwidth":
        transfers, rounds, buffers = max(1, work.count // 2), 1, ["-B", str(STREAM_BUFFER)]
    numbers = ["-S", str(work.size), "-C", str(transfers), "-I", str(rounds), *buffers]
    return ["rstream", "-b" if is_server else "-s", host, "-p", str(port), *numbers, "-T", "b"]


def rstream_microseconds(output: str) -> float:
    """Return the last column: microseconds for each transfer.

    Raises:
        ValueError: the output has no result.
    """
    lines = [line.split() for line in output.splitlines() if line.startswith("custom")]
    if not lines:
        raise ValueError("there is no result line")
    return float(lines[-1][-1])


def parse_rstream_latency(output: str) -> Sample:
    """Return the mean time of a round trip, which is two transfers.

    rstream times all transfers together: there are no percentiles.
    """
    return Sample(2 * rstream_microseconds(output))


def parse_rstream_bandwidth(output: str, size: int) -> Sample:
    """Return the bandwidth in MB/s of transfers of `size` bytes."""
    return Sample(size / rstream_microseconds(output))
