"""Dask over RDMA on real devices: a cluster, the memory of its idle comms, and the example."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import dask
import loops
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.comm.core import CommClosedError, connect, listen
from example_runs import run

from aiordma.dask import RdmaComm
from aiordma.dask.addresses import to_uri
from aiordma.rdmacm import DeviceAddress

pytestmark = [pytest.mark.loops("asyncio", "uvloop"), pytest.mark.may_block]

NUMBERS = np.arange(1 << 19)


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path) -> Iterator[None]:
    """Use a directory of the test, and time limits for a slow machine."""
    values = {
        "temporary-directory": str(tmp_path),
        "distributed.comm.timeouts.connect": "120s",
        "distributed.admin.tick.limit": "1h",
    }
    with dask.config.set(values):
        yield


@contextlib.asynccontextmanager
async def cluster(
    address: DeviceAddress,
) -> AsyncIterator[tuple[Client, Scheduler, list[Worker]]]:
    """Start a scheduler, two workers and a client. All but the scheduler know its address only."""
    async with (
        Scheduler(host=to_uri(address.host, 0), dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as first,
        Worker(scheduler.address, nthreads=1, dashboard=False) as second,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        yield client, scheduler, [first, second]


async def test_a_cluster_that_knows_the_address_of_its_scheduler(address: DeviceAddress) -> None:
    async with cluster(address) as (client, _, workers):
        uris = [worker.address for worker in workers]
        assert all(uri.startswith("rdma://") for uri in uris)
        halves = [
            client.submit(np.multiply, NUMBERS, number, workers=[uri], pure=False)
            for number, uri in enumerate(uris, 1)
        ]
        total = client.submit(np.add, *halves, workers=[uris[0]])
        np.testing.assert_array_equal(await total, 3 * NUMBERS)
        assert workers[1].transfer_outgoing_bytes_total >= NUMBERS.nbytes


async def test_a_task_of_a_worker_that_fails_is_done_by_another(address: DeviceAddress) -> None:
    async with cluster(address) as (client, scheduler, workers):
        first = workers[0]
        product = client.submit(
            np.multiply, NUMBERS, 2, workers=[first.address], allow_other_workers=True
        )
        await wait(product)
        assert list(first.data) == [product.key]
        stream = first.batched_stream
        assert stream is not None
        assert stream.comm is not None
        stream.comm.abort()
        await loops.until(
            lambda: first.address not in scheduler.workers, "the scheduler to notice the failure"
        )
        np.testing.assert_array_equal(await product, 2 * NUMBERS)


async def test_idle_comms_pin_little_memory(address: DeviceAddress) -> None:
    comms: list[RdmaComm] = []
    async with listen(to_uri(address.host, 0), comms.append) as listener:
        first = await connect(listener.contact_address)
        before = pinned()
        others = [await connect(listener.contact_address) for _ in range(50)]
        await loops.until(lambda: len(comms) == 51, "all comms to be accepted")
        each = (pinned() - before) / (2 * len(others))
        print(f"an idle comm pins {each / 1024:.1f} KiB")
        assert each <= 40 << 10
        for comm in [first, *others]:
            await comm.close()
        for comm in comms:
            with pytest.raises(CommClosedError):
                await comm.read()
            await comm.close()


def pinned() -> int:
    """Return the memory that is pinned for devices in this process, in bytes. See proc(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not count pinned memory")


@pytest.mark.transport("IB")
@pytest.mark.campaign
@pytest.mark.loops("asyncio")
async def test_the_example(address: DeviceAddress) -> None:
    done = await run("dask_array", address.host, "--size", "1000")
    assert done.status == 0, done.errors
    lines = done.output.splitlines()
    assert lines[0].startswith(f"scheduler: rdma://{address.host}:")
    assert lines[1] == "the medians of 1000 columns are right"
    assert float(lines[2].split()[4]) >= 4
