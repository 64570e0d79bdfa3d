"""Endpoint: the parts that need no queue pair."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from fakes.cm import FakeCm, event, fake_cm, raw_of
from fakes.qp import FakePages, completion

from aiordma import ConnectionOptions, DeviceRemoved, PeerClosed, VerbsError
from aiordma.cm import CmState
from aiordma.dispatch import loop_device
from aiordma.enums import AccessFlags, CmEventType
from aiordma.loop import running_loop
from aiordma.memory import PooledBuffer
from aiordma.messages.connection import MessageEndpoint, message_endpoint
from aiordma.qp import RECEIVE
from aiordma.qp import endpoint as endpoint_module
from aiordma.verbs import DeviceAttributes


class ShallowDevice:
    name = "shallow0"
    is_iwarp = False
    attributes = DeviceAttributes(
        max_qp_wr=100,
        max_sge=4,
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
                message_endpoint(cm_id, ConnectionOptions(send_depth=101))
        async with asyncio.timeout(20):
            while devices_in_use():
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def connected(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MessageEndpoint]:
    """An endpoint with 10 receives that count as posted. None of them ever completes."""
    with fake_cm(running_loop(), monkeypatch) as made:
        cm_id = made.make_id(CmState.CONNECTED)
        monkeypatch.setattr(raw_of(cm_id), "device", ShallowDevice, raising=False)
        endpoint = message_endpoint(cm_id, ConnectionOptions(send_depth=10, recv_depth=10))
        endpoint.data_path._ring.posted = 10
        yield endpoint
        endpoint.abort()
        await cm_id.aclose()
        assert devices_in_use() == 0


async def receiving(endpoint: MessageEndpoint) -> asyncio.Task[bytes]:
    task = asyncio.create_task(endpoint.data_path.receiver.recv())
    while not endpoint.data_path.receiver.is_waited_for:
        await asyncio.sleep(0)
    return task


@pytest.mark.asyncio
async def test_a_device_failure_is_raised_to_receivers_and_senders(
    connected: MessageEndpoint,
) -> None:
    task = await receiving(connected)
    connected.device_failed(VerbsError(errno.ENODEV, "ibv_get_cq_event"))
    message = "device was removed: .*ibv_get_cq_event: No such device"
    with pytest.raises(DeviceRemoved, match=message):
        await task
    with pytest.raises(DeviceRemoved, match=message):
        await connected.data_path.sender.send_copy(b"data", 4, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, DeviceRemoved), (errno.ENODEV, DeviceRemoved), (errno.EINVAL, VerbsError)],
)
async def test_errors_of_a_removed_device_become_device_removed(
    connected: MessageEndpoint, code: int, kind: type[Exception]
) -> None:
    connected.device_failed(VerbsError(code, "ibv_poll_cq"))
    with pytest.raises(kind, match="ibv_poll_cq") as caught:
        await connected.data_path.receiver.recv()
    assert type(caught.value) is kind
    if isinstance(caught.value, VerbsError):
        assert caught.value.errno == code


class Refusing:
    """A queue pair that refuses all requests."""

    def __init__(self, code: int) -> None:
        self.code = code

    def post_send_inline(self, *args: object) -> None:
        raise VerbsError(self.code, "ibv_post_send")

    def post_send_copy(self, *args: object) -> None:
        raise VerbsError(self.code, "ibv_post_send")

    def post_recv(self, *args: object) -> None:
        raise VerbsError(self.code, "ibv_post_recv")


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [1, 1000])
async def test_a_refused_send_ends_the_connection(connected: MessageEndpoint, nbytes: int) -> None:
    home: deque[PooledBuffer] = deque()
    buffer = PooledBuffer(home, 0x1000, 99, memoryview(bytearray(1024)))
    connected.data_path.sends._qp = Refusing(errno.EINVAL)  # type: ignore[assignment]
    connected.data_path.sends.try_buffer = lambda nbytes: buffer  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(VerbsError, match="ibv_post_send"):
            await connected.data_path.sender.send_copy(bytes(nbytes), nbytes, -1)
    assert connected.closed
    assert not home  # the device might still read it
    connected.abort()
    await connected.cm.aclose()
    assert list(home) == ([buffer] if nbytes > connected.options.max_inline else [])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("iwarp", "code", "kind"),
    [
        (True, errno.ENOTCONN, PeerClosed),
        (True, errno.EINVAL, VerbsError),
        (False, errno.ENOTCONN, VerbsError),
    ],
)
async def test_iwarp_refuses_a_send_when_the_peer_has_closed(
    connected: MessageEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    iwarp: bool,
    code: int,
    kind: type[Exception],
) -> None:
    monkeypatch.setattr(ShallowDevice, "is_iwarp", iwarp)
    connected.data_path.sends._qp = Refusing(code)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(kind):
            await connected.data_path.sender.send_copy(b"x", 1, -1)


@pytest.mark.asyncio
async def test_a_send_without_memory_does_not_end_the_connection(
    connected: MessageEndpoint,
) -> None:
    async def fail(*args: object) -> PooledBuffer:
        raise VerbsError(errno.ENOMEM, "ibv_reg_mr")

    connected.data_path.sends.try_buffer = lambda nbytes: None  # type: ignore[method-assign]
    connected.data_path.sends.buffer = fail  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(5):
        for _ in range(20):  # no send credit is lost either
            with pytest.raises(VerbsError, match="ibv_reg_mr"):
                await connected.data_path.sender.send_copy(bytes(1000), 1000, -1)
    assert not connected.closed


@pytest.mark.asyncio
async def test_a_message_whose_slot_is_refused_is_not_lost(connected: MessageEndpoint) -> None:
    ring = connected.data_path._ring
    pages: Any = FakePages(None, ring.slots * ring.slot_size, AccessFlags.LOCAL_WRITE)
    pages.memory[:5] = b"hello"
    ring.use_region(pages)
    ring._open(Refusing(errno.EINVAL), (0, 0), 0)
    ring.posted = 10
    connected.data_path.complete(RECEIVE, completion(5))
    assert await connected.data_path.receiver.recv() == b"hello"
    assert connected.closed
    connected._expect_no_completions()
    with pytest.raises(VerbsError, match="ibv_post_recv"):
        await connected.data_path.receiver.recv()


@pytest.mark.asyncio
async def test_the_first_cause_is_kept(connected: MessageEndpoint) -> None:
    connected.cm.handle_event(event(CmEventType.DEVICE_REMOVAL, -errno.EIO))
    connected.device_failed(VerbsError(errno.ENODEV, "ibv_get_cq_event"))
    with pytest.raises(DeviceRemoved, match="device was removed: "):
        await connected.data_path.receiver.recv()


@pytest.mark.asyncio
async def test_the_wait_for_a_flush_ends_after_a_timeout(
    connected: MessageEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "FLUSH_SECONDS", 0.05)
    task = await receiving(connected)
    connected.cm.handle_event(event(CmEventType.DISCONNECTED))
    await asyncio.sleep(0.01)
    assert not task.done()  # messages might still come before the flushed receives
    async with asyncio.timeout(5):
        with pytest.raises(PeerClosed):
            await task


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("is_siw", "has_received", "probes"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
async def test_only_siw_without_a_received_message_is_probed(
    connected: MessageEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    is_siw: bool,
    has_received: bool,
    probes: int,
) -> None:
    probed: list[None] = []
    monkeypatch.setattr(connected.data_path, "probe", lambda: probed.append(None))
    attributes = replace(ShallowDevice.attributes, is_siw=is_siw)
    monkeypatch.setattr(ShallowDevice, "attributes", attributes)
    connected.data_path.sends.pause()
    if has_received:
        connected.message_arrived()
    connected._no_first_message()
    assert len(probed) == probes
    assert connected.data_path.sends.try_reserve()
    connected.data_path.sends.unreserve()


@pytest.mark.asyncio
async def test_an_aborted_endpoint_does_not_resume_sends(
    connected: MessageEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message or its timeout can come while the queue pair is being destroyed."""
    resumed: list[None] = []
    monkeypatch.setattr(connected.data_path, "resume", lambda: resumed.append(None))
    connected.abort()
    connected.message_arrived()
    connected._no_first_message()
    assert resumed == []


@pytest.mark.asyncio
async def test_the_first_message_lets_the_accepting_side_send(connected: MessageEndpoint) -> None:
    sends = connected.data_path.sends
    sends.pause()
    assert not sends.try_reserve()
    connected.message_arrived()
    assert sends.try_reserve()
    sends.unreserve()
    sends.pause()
    connected.message_arrived()  # this is not the first one
    assert not sends.try_reserve()
    sends.resume()
