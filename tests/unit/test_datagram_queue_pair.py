"""DatagramEngine, as far as it goes without a device: what its waiters are told in the end."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio
from cm_fakes import event, fake_cm, raw_of

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

WAY = AddressHandleAttributes(dlid=1)


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
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DatagramQueuePair]:
    """An engine that listens, as if its queue pair were made."""
    with fake_cm(running_loop(), monkeypatch) as made:
        cm = made.make_id(CmState.LISTENING)
        raw = raw_of(cm)
        monkeypatch.setattr(raw, "device", FakeDevice, raising=False)
        monkeypatch.setattr(raw, "route", SimpleNamespace(sgid=bytes(16)), raising=False)
        monkeypatch.setattr(raw, "port_num", 1, raising=False)
        engine = DatagramQueuePair(cm, DatagramOptions(send_depth=1, recv_depth=2))
        engine.receive_ring = DatagramReceiveRing(2, 1024)
        engine.max_message_size = 1024
        yield engine
        engine.abort()
        await cm.aclose()
        assert not loop_device._loop_devices.get(running_loop())


async def waiters(engine: DatagramQueuePair) -> list[asyncio.Task[object]]:
    """One at each place where one can wait."""
    assert engine._sends.try_reserve()
    book = SimpleNamespace(acquire=acquire)
    engine._handles = book  # type: ignore[assignment]
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(engine.recv_from()),
        asyncio.create_task(engine.get_request()),
        asyncio.create_task(engine.send_to(WAY, (1, 2), b"", -1)),
    ]
    await asyncio.sleep(0)
    return tasks


async def acquire(way: object) -> SimpleNamespace:
    return SimpleNamespace(release=lambda: None)


async def ends(tasks: list[asyncio.Task[object]]) -> list[object]:
    async with asyncio.timeout(5):
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
async def test_a_device_that_is_gone(engine: DatagramQueuePair, code: int) -> None:
    tasks = await waiters(engine)
    engine.device_failed(VerbsError(code, "ibv_get_cq_event"))
    assert [type(end) for end in await ends(tasks)] == [DeviceRemoved] * 3
    assert engine.closed
    with pytest.raises(DeviceRemoved):
        engine.listen(0)


async def test_a_device_that_fails_otherwise(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    engine.device_failed(VerbsError(errno.EINVAL, "ibv_poll_cq"))
    assert [type(end) for end in await ends(tasks)] == [VerbsError] * 3


async def test_the_removal_that_the_id_hears_of(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    engine.cm.handle_event(event(CmEventType.DEVICE_REMOVAL))
    assert [type(end) for end in await ends(tasks)] == [DeviceRemoved] * 3


async def test_an_event_that_cannot_be(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    engine.cm.handle_event(event(CmEventType.DISCONNECTED))
    assert all(isinstance(end, RdmaError) for end in await ends(tasks))


async def test_the_queue_pair_fails(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    engine._on_queue_pair_event(AsyncEvent("fake0", AsyncEventType.SQ_DRAINED))
    assert not engine.closed
    engine._on_queue_pair_event(AsyncEvent("fake0", AsyncEventType.QP_FATAL))
    assert [type(end) for end in await ends(tasks)] == [RdmaError] * 3


async def test_a_request_fails(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    wc = SimpleNamespace(status=WcStatus.LOC_QP_OP_ERR, vendor_err=3)
    engine.complete(0, wc)  # type: ignore[arg-type]
    for end in await ends(tasks):
        assert isinstance(end, WorkRequestError)
        assert end.status is WcStatus.LOC_QP_OP_ERR


async def test_the_first_cause_is_kept(engine: DatagramQueuePair) -> None:
    engine.device_failed(VerbsError(errno.EIO, "ibv_get_cq_event"))
    engine.device_failed(VerbsError(errno.EINVAL, "ibv_poll_cq"))
    with pytest.raises(DeviceRemoved, match="ibv_get_cq_event"):
        await engine.recv_from()


async def test_closing(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    await engine.aclose()
    assert [type(end) for end in await ends(tasks)] == [LocalClosed] * 3
    await engine.aclose()


async def test_only_one_task_waits_in_each_place(engine: DatagramQueuePair) -> None:
    tasks = await waiters(engine)
    with pytest.raises(BusyError, match="receiving"):
        await engine.recv_from()
    with pytest.raises(BusyError, match="requests"):
        await engine.get_request()
    engine.abort()
    await ends(tasks)


async def test_the_options_are_checked_before_anything_is_made(
    engine: DatagramQueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="fake0 allows"):
        DatagramQueuePair(engine.cm, DatagramOptions(recv_depth=101))
