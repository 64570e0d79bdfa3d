"""DatagramQueuePair without a device: the errors that waiting tasks get when it ends."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio
from fakes.cm import event, fake_cm, raw_of

from aiordma import (
    BusyError,
    DatagramOptions,
    DeviceRemoved,
    LocalClosed,
    RdmaError,
    VerbsError,
    WorkRequestError,
)
from aiordma.cm import CmState
from aiordma.datagrams import DatagramQueuePair
from aiordma.datagrams.datagram_receive_ring import DatagramReceiveRing
from aiordma.dispatch import loop_device
from aiordma.enums import AsyncEventType, CmEventType, WcStatus
from aiordma.loop import running_loop
from aiordma.verbs import AddressHandleAttributes, AsyncEvent, DeviceAttributes

pytestmark = pytest.mark.asyncio

KEY = AddressHandleAttributes(dlid=1)


class FakeDevice:
    name = "fake0"
    is_iwarp = False
    attributes = DeviceAttributes(
        max_qp_wr=100,
        max_sge=1,
        max_cqe=1000,
        max_mr_size=1 << 30,
        max_qp_rd_atom=1,
        max_qp_init_rd_atom=1,
    )


@pytest_asyncio.fixture
async def queue_pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DatagramQueuePair]:
    """A DatagramQueuePair that listens, without a C queue pair."""
    with fake_cm(running_loop(), monkeypatch) as made:
        cm = made.make_id(CmState.LISTENING)
        raw = raw_of(cm)
        monkeypatch.setattr(raw, "device", FakeDevice, raising=False)
        monkeypatch.setattr(raw, "route", SimpleNamespace(sgid=bytes(16)), raising=False)
        monkeypatch.setattr(raw, "port_num", 1, raising=False)
        queue_pair = DatagramQueuePair(cm, DatagramOptions(send_depth=1, recv_depth=2))
        queue_pair.receive_ring = DatagramReceiveRing(2, 1024)
        queue_pair.max_message_size = 1024
        yield queue_pair
        queue_pair.abort()
        await cm.aclose()
        assert not loop_device._loop_devices.get(running_loop())


async def waiting_tasks(queue_pair: DatagramQueuePair) -> list[asyncio.Task[object]]:
    """Start a task in each method that can wait."""
    assert queue_pair._sends.try_reserve()
    handles = SimpleNamespace(acquire=acquire)
    queue_pair._handles = handles  # type: ignore[assignment]
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(queue_pair.recv_from()),
        asyncio.create_task(queue_pair.get_request()),
        asyncio.create_task(queue_pair.send_to(KEY, (1, 2), b"", -1)),
    ]
    await asyncio.sleep(0)
    return tasks


async def acquire(key: object) -> SimpleNamespace:
    return SimpleNamespace(release=lambda: None)


async def results(tasks: list[asyncio.Task[object]]) -> list[object]:
    """Wait for the tasks. Return their results and exceptions."""
    async with asyncio.timeout(5):
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
async def test_a_removed_device_raises_device_removed(
    queue_pair: DatagramQueuePair, code: int
) -> None:
    tasks = await waiting_tasks(queue_pair)
    queue_pair.device_failed(VerbsError(code, "ibv_get_cq_event"))
    assert [type(result) for result in await results(tasks)] == [DeviceRemoved] * 3
    assert queue_pair.closed
    with pytest.raises(DeviceRemoved):
        queue_pair.listen(0)


async def test_another_failure_of_the_device_raises_verbs_error(
    queue_pair: DatagramQueuePair,
) -> None:
    tasks = await waiting_tasks(queue_pair)
    queue_pair.device_failed(VerbsError(errno.EINVAL, "ibv_poll_cq"))
    assert [type(result) for result in await results(tasks)] == [VerbsError] * 3


async def test_a_device_removal_event_raises_device_removed(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    queue_pair.cm.handle_event(event(CmEventType.DEVICE_REMOVAL))
    assert [type(result) for result in await results(tasks)] == [DeviceRemoved] * 3


async def test_an_unexpected_event_ends_the_endpoint(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    queue_pair.cm.handle_event(event(CmEventType.DISCONNECTED))
    assert all(isinstance(result, RdmaError) for result in await results(tasks))


async def test_a_failed_queue_pair_ends_the_endpoint(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    queue_pair._on_queue_pair_event(AsyncEvent("fake0", AsyncEventType.SQ_DRAINED))
    assert not queue_pair.closed
    queue_pair._on_queue_pair_event(AsyncEvent("fake0", AsyncEventType.QP_FATAL))
    assert [type(result) for result in await results(tasks)] == [RdmaError] * 3


async def test_a_failed_request_ends_the_endpoint(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    wc = SimpleNamespace(status=WcStatus.LOC_QP_OP_ERR, vendor_err=3)
    queue_pair.complete(0, wc)  # type: ignore[arg-type]
    for result in await results(tasks):
        assert isinstance(result, WorkRequestError)
        assert result.status is WcStatus.LOC_QP_OP_ERR


async def test_the_first_cause_is_raised_after_two_failures(queue_pair: DatagramQueuePair) -> None:
    queue_pair.device_failed(VerbsError(errno.EIO, "ibv_get_cq_event"))
    queue_pair.device_failed(VerbsError(errno.EINVAL, "ibv_poll_cq"))
    with pytest.raises(DeviceRemoved, match="ibv_get_cq_event"):
        await queue_pair.recv_from()


async def test_closing_raises_local_closed_in_waiting_tasks(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    await queue_pair.aclose()
    assert [type(result) for result in await results(tasks)] == [LocalClosed] * 3
    await queue_pair.aclose()


async def test_a_second_task_that_waits_gets_busy_error(queue_pair: DatagramQueuePair) -> None:
    tasks = await waiting_tasks(queue_pair)
    with pytest.raises(BusyError, match="receiving"):
        await queue_pair.recv_from()
    with pytest.raises(BusyError, match="requests"):
        await queue_pair.get_request()
    queue_pair.abort()
    await results(tasks)


async def test_options_are_checked_before_the_queue_pair_is_created(
    queue_pair: DatagramQueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="fake0 allows"):
        DatagramQueuePair(queue_pair.cm, DatagramOptions(recv_depth=101))
