"""Endpoint, as far as it goes without a queue pair."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from cm_fakes import FakeCm, event, fake_cm, raw_of

from aiordma import ConnectionOptions, DeviceRemoved, PeerClosed, VerbsError
from aiordma import endpoint as endpoint_module
from aiordma.cm import CmState
from aiordma.dispatch import loop_device
from aiordma.endpoint import Endpoint
from aiordma.enums import CmEventType
from aiordma.loop import running_loop
from aiordma.verbs import DeviceAttributes


class ShallowDevice:
    name = "shallow0"
    is_iwarp = False
    attributes = DeviceAttributes(
        max_qp_wr=100,
        max_sge=1,
        max_cqe=1000,
        max_mr_size=1 << 30,
        max_qp_rd_atom=1,
        max_qp_init_rd_atom=1,
    )


def devices_in_use() -> int:
    return len(loop_device._loop_devices.get(running_loop(), {}))


@pytest.mark.asyncio
async def test_options_beyond_the_device_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cm(running_loop(), monkeypatch) as made:
        cm: FakeCm = made
        async with cm.make_id() as cm_id:
            monkeypatch.setattr(raw_of(cm_id), "device", ShallowDevice, raising=False)
            with pytest.raises(ValueError, match="shallow0 allows"):
                Endpoint(cm_id, ConnectionOptions(send_depth=101))
        await asyncio.sleep(0.01)
        assert devices_in_use() == 0


@pytest_asyncio.fixture
async def connected(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    """An endpoint as if its receives were posted, on a device that completes none of them."""
    with fake_cm(running_loop(), monkeypatch) as made:
        cm_id = made.make_id(CmState.CONNECTED)
        monkeypatch.setattr(raw_of(cm_id), "device", ShallowDevice, raising=False)
        endpoint = Endpoint(cm_id, ConnectionOptions(send_depth=10, recv_depth=10))
        endpoint._ring.posted = 10
        yield endpoint
        endpoint.abort()
        await cm_id.aclose()
        assert devices_in_use() == 0


async def receiving(endpoint: Endpoint) -> asyncio.Task[bytes]:
    task = asyncio.create_task(endpoint.recv())
    while not len(endpoint._receivers):
        await asyncio.sleep(0)
    return task


@pytest.mark.asyncio
async def test_the_failure_of_the_device_is_what_receivers_get(connected: Endpoint) -> None:
    task = await receiving(connected)
    connected.device_failed(VerbsError(errno.ENODEV, "ibv_get_cq_event"))
    with pytest.raises(VerbsError, match="ibv_get_cq_event") as caught:
        await task
    assert caught.value.errno == errno.ENODEV
    with pytest.raises(VerbsError, match="ibv_get_cq_event"):
        await connected.send(b"data", 0)


@pytest.mark.asyncio
async def test_the_first_cause_is_the_one_that_is_kept(connected: Endpoint) -> None:
    connected.cm.handle_event(event(CmEventType.DEVICE_REMOVAL, -errno.EIO))
    connected.device_failed(VerbsError(errno.ENODEV, "ibv_get_cq_event"))
    with pytest.raises(DeviceRemoved, match="device was removed: "):
        await connected.recv()


@pytest.mark.asyncio
async def test_a_flush_that_never_comes_is_not_waited_for_without_end(
    connected: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "FLUSH_SECONDS", 0.05)
    task = await receiving(connected)
    connected.cm.handle_event(event(CmEventType.DISCONNECTED))
    await asyncio.sleep(0.01)
    assert not task.done()  # messages may still be among what is flushed
    async with asyncio.timeout(5):
        with pytest.raises(PeerClosed):
            await task
