"""Dask over RDMA: an array computation on a scheduler and two worker processes.

    python examples/dask_array.py 10.7.1.1
    python examples/dask_array.py 10.7.1.1 --protocol tcp --size 4000

It takes the median of each column of an array that is stored by rows, so that the workers need half
of the array of each other. It prints the bytes that they sent to each other, and the processor time
of their processes. It needs distributed and numpy: `pip install aiordma[dask] numpy`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
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
    part = size // blocks
    rows = da.arange(size**2, chunks=part * size, dtype="f8").reshape(size, size).persist()
    wait(rows)
    before, start = total(client.run(use_of)), time.monotonic()
    columns = rows.rechunk((size, part), method="tasks")
    medians = columns.map_blocks(np.median, axis=0, drop_axis=0).compute()
    seconds, after = time.monotonic() - start, total(client.run(use_of))
    if not np.array_equal(medians, size * (size - 1) / 2 + np.arange(size)):
        raise SystemExit("dask_array: the medians are wrong")
    print(f"the medians of {size} columns are right")
    moved = (after.nbytes - before.nbytes) / 1e6
    print(f"moved between the workers: {moved:.1f} MB in {seconds:.2f} s")
    print(f"processor time of the workers: {after.cpu - before.cpu:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("host", help="an address of this machine's RDMA device")
    parser.add_argument("--protocol", default="rdma", choices=["rdma", "tcp"])
    parser.add_argument("--size", type=int, default=2000, help="rows and columns of the array")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of rows")
    parser.add_argument("--runs", type=int, default=1, help="repetitions of the computation")
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
        for _ in range(arguments.runs):
            compute(client, arguments.size, arguments.blocks)


if __name__ == "__main__":
    main()
