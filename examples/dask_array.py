"""Dask over RDMA: an array computation on a scheduler and two worker processes.

    python examples/dask_array.py 10.7.1.1
    python examples/dask_array.py 10.7.1.1 --protocol tcp --size 4000

It adds an array to its transpose, so that the workers need the blocks of each other, and prints the
bytes that they sent to each other and the processor time of their processes. It needs distributed
and numpy: `pip install aiordma[dask] numpy`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

import dask
import dask.array as da
from distributed import Client, LocalCluster, Worker, wait

WORKERS = 2


class Use(NamedTuple):
    """The processor time of a worker's process in seconds, and the bytes that it has sent."""

    cpu: float
    nbytes: int


def use_of(dask_worker: Worker) -> Use:
    """Return the use of the worker that runs this. distributed passes the worker."""
    times = os.times()
    return Use(times.user + times.system, dask_worker.transfer_outgoing_bytes_total)


def total(uses: Mapping[str, Use]) -> Use:
    """Return the sums of the uses of all workers."""
    return Use(sum(use.cpu for use in uses.values()), sum(use.nbytes for use in uses.values()))


def compute(client: Client, size: int, blocks: int) -> None:
    """Compute, and print what it took.

    Raises:
        SystemExit: the result is wrong.
    """
    numbers = da.arange(size * size, chunks=size * size // blocks, dtype="f8")
    array = numbers.reshape(size, size).rechunk(size // blocks).persist()
    wait(array)
    before, start = total(client.run(use_of)), time.monotonic()
    result = int((array + array.T).sum().compute())
    seconds, after = time.monotonic() - start, total(client.run(use_of))
    if result != size**2 * (size**2 - 1):
        raise SystemExit(f"dask_array: the sum is wrong: {result}")
    moved = (after.nbytes - before.nbytes) / 1e6
    print(f"the sum is right: {result}")
    print(f"moved between the workers: {moved:.1f} MB in {seconds:.2f} s")
    print(f"processor time of the workers: {after.cpu - before.cpu:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("host", help="an address of this machine's RDMA device")
    parser.add_argument("--protocol", default="rdma", choices=["rdma", "tcp"])
    parser.add_argument("--size", type=int, default=2000, help="rows and columns of the array")
    parser.add_argument("--blocks", type=int, default=4, help="blocks in a row of the array")
    arguments = parser.parse_args()
    dask.config.set({"distributed.comm.timeouts.connect": "120s"})
    with (
        LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            protocol=arguments.protocol,
            host=arguments.host,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        print(f"scheduler: {cluster.scheduler_address}")
        compute(client, arguments.size, arguments.blocks)


if __name__ == "__main__":
    main()
