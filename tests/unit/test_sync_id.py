"""SyncCmId: calls of its worker thread and of its task at once. tests/device tests the rest."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fakes.cm import FakeCm, FakeCmId, FakeOwnChannel, event, fake_cm

from aiordma import BusyError, LocalClosed, VerbsError
from aiordma.cm import CmState, SyncCmId
from aiordma.cm.handle import IdHandle
from aiordma.enums import CmEventType
from aiordma.loop import running_loop

pytestmark = pytest.mark.asyncio

TIME_LIMIT = 10


@pytest_asyncio.fixture
async def cm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCm]:
    with fake_cm(running_loop(), monkeypatch) as made:
        yield made
        async with asyncio.timeout(TIME_LIMIT):
            while any(channel.references for channel in made.channels):
                await asyncio.sleep(0.001)
        assert [raw.calls.count("destroy") for raw in made.ids.values()] == [1] * len(made.ids)


def make_sync_id(
    cm: FakeCm, state: CmState = CmState.IDLE
) -> tuple[SyncCmId, FakeCmId, FakeOwnChannel]:
    raw, channel = cm.raw_id(), cm.open_channel()
    raw.request_qp_arguments = None  # type: ignore[attr-defined]
    handle = IdHandle(running_loop(), raw, channel)  # type: ignore[arg-type]
    return SyncCmId(handle, state, None), raw, channel


async def test_a_late_change_by_a_thread_does_not_reopen_a_closed_id(cm: FakeCm) -> None:
    cm_id, _, _ = make_sync_id(cm, CmState.CONNECTING)
    cm_id.abort()
    cm_id._state.current = CmState.CONNECTED
    assert cm_id.state is CmState.CLOSED
    await cm_id.aclose()


async def test_a_request_that_arrives_while_the_listener_closes_is_rejected(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _, _ = make_sync_id(cm, CmState.LISTENING)
    request = cm.request_event()
    racing = RacingRequests(listener)
    monkeypatch.setattr(listener._requests, "_requests", racing)
    listener.handle_event(request)
    assert racing == []
    await asyncio.to_thread(cm.ids[request.id].destroyed.wait, TIME_LIMIT)
    await listener.aclose()


class RacingRequests(list[object]):
    """The requests of a listener that is closed just before a request is added."""

    def __init__(self, listener: SyncCmId) -> None:
        super().__init__()
        self._listener = listener

    def append(self, request: object) -> None:
        self._listener.abort()
        super().append(request)

    def popleft(self) -> object:
        return self.pop(0)


async def test_requests_are_returned_in_order_with_a_channel_each(cm: FakeCm) -> None:
    listener, _, channel = make_sync_id(cm, CmState.LISTENING)
    waiting = asyncio.create_task(listener.get_request())
    await asyncio.sleep(0.01)
    requests = [cm.request_event(data) for data in (b"one", b"two")]
    for request in requests:
        channel.put(request)
    for number, request in enumerate(requests):
        taken = await (listener.get_request() if number else waiting)
        assert taken.event is request
        channels: list[object] = [*cm.channels]
        assert taken.handle.channel is channels[1 + number]
        assert cm.ids[request.id].calls == ["migrate"]
        await taken.aclose()
    await listener.aclose()


async def test_a_request_without_a_channel_is_rejected(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _, channel = make_sync_id(cm, CmState.LISTENING)
    channel.put(cm.request_event(b"one"))
    channel.put(cm.request_event(b"two"))

    def fail() -> FakeOwnChannel:
        raise VerbsError(errno.EMFILE, "rdma_create_event_channel")

    with monkeypatch.context() as patch:
        patch.setattr("aiordma.cm.handle.OwnChannel", fail)
        with pytest.raises(VerbsError, match="rdma_create_event_channel"):
            await listener.get_request()
    async with await listener.get_request() as request:
        assert request.event is not None
        assert request.event.private_data == b"two"
    await listener.aclose()


async def test_cancelling_while_a_request_is_prepared_loses_no_request(cm: FakeCm) -> None:
    listener, _, channel = make_sync_id(cm, CmState.LISTENING)
    request = cm.request_event()
    loop, waiting = asyncio.get_running_loop(), asyncio.create_task(listener.get_request())
    cm.ids[request.id].during["migrate"] = lambda: loop.call_soon_threadsafe(waiting.cancel)
    channel.put(request)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with await listener.get_request() as taken:
        assert taken.event is request
        assert cm.ids[request.id].calls == ["migrate"]
    await listener.aclose()


async def test_migrating_a_listener_to_the_loop_keeps_its_channel(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, raw, channel = make_sync_id(cm, CmState.LISTENING)
    request = cm.request_event()
    listener.handle_event(request)

    moved = listener._move_to(cm.dispatcher)  # type: ignore[arg-type]
    assert listener.state is CmState.CLOSED
    assert listener.event_fds() == []
    listener.read_events()  # as a wait for completions does: it leaves the events to the loop
    assert raw.calls == []
    assert channel.references == 3  # the id, the loop, and the request
    async with await moved.get_request() as taken:
        assert taken.event is request
    await moved.aclose()


async def test_migrating_an_id_that_does_not_listen_closes_its_channel(cm: FakeCm) -> None:
    cm_id, raw, channel = make_sync_id(cm)
    cm.dispatcher.read_all = lambda: None  # type: ignore[attr-defined]
    moved = cm_id._move_to(cm.dispatcher)  # type: ignore[arg-type]
    assert raw.calls == ["migrate"]
    assert channel.references == 0
    await moved.aclose()


async def test_a_removed_device_ends_the_wait_for_requests(cm: FakeCm) -> None:
    listener, _, channel = make_sync_id(cm, CmState.LISTENING)
    waiting = asyncio.create_task(listener.get_request())
    channel.put(event(CmEventType.DEVICE_REMOVAL))
    with pytest.raises(Exception, match="removed"):
        await waiting
    await listener.aclose()


async def test_two_calls_at_once_raise_busy_error(cm: FakeCm) -> None:
    cm_id, _, _ = make_sync_id(cm)
    with cm_id._in_use(), pytest.raises(BusyError), cm_id._in_use():
        raise AssertionError("two at once")
    cm_id.abort()
    with pytest.raises(LocalClosed):
        await cm_id.get_request()
    await cm_id.aclose()
