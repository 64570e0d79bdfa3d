"""Compares a comm of distributed over RDMA to one over TCP: the last table of docs/dask.md.

    python -m aiordma lab run -- python -m benchmarks.dask_comm [--rounds N] [HOST]

An object is sent to a peer in the same process, and a short answer comes back. It prints the
median times in milliseconds, and the processor time of the process for each object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
from distributed.comm.core import Comm, connect, listen
from distributed.protocol.serialize import to_serialize

from aiordma.rdmacm import device_addresses

OBJECTS = {
    "a short string": "ping",
    "a string of 3,000 characters": "x" * 3000,
    "an array of 1 MB": to_serialize(np.zeros(1_000_000, dtype=np.uint8)),
    "an array of 16 MB": to_serialize(np.zeros(16_000_000, dtype=np.uint8)),
}
WARMUP = 3


async def answer(comm: Comm) -> None:
    """Answer each object of a peer, until it closes the comm."""
    try:
        while True:
            await comm.read()
            await comm.write("ok")
    except OSError:
        comm.abort()


async def measure(address: str, rounds: int) -> None:
    """Print a line for each object."""
    async with await listen(address, answer) as listener:
        comm = await connect(listener.contact_address)
        for title, message in OBJECTS.items():
            times = []
            for number in range(WARMUP + rounds):
                if number == WARMUP:
                    used = time.process_time()
                began = time.perf_counter()
                await comm.write(message)
                await comm.read()
                times.append(time.perf_counter() - began)
            used = (time.process_time() - used) / rounds
            median = statistics.median(times[WARMUP:])
            print(f"{address:<20} {title:<30} {median * 1e3:8.1f} ms {used * 1e3:8.1f} ms")
        await comm.close()


async def main(host: str, rounds: int) -> None:
    """Measure both, in turn, twice."""
    for _ in range(2):
        for scheme in ("rdma", "tcp"):
            await measure(f"{scheme}://{host}", rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("host", nargs="?", help="the address of a device of this machine")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    address = arguments.host or next(one.host for one in device_addresses())
    asyncio.run(main(address, arguments.rounds))
