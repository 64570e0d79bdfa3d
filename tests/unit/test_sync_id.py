"""What a synchronous id does when a thread and its owner meet; the rest is tested on a device."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from cm_fakes import FakeCm, FakeCmId, FakeOwnChannel, event, fake_cm

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
            while any(channel.holders for channel in made.channels):
                await asyncio.sleep(0.001)
        assert [raw.calls.count("destroy") for raw in made.ids.values()] == [1] * len(made.ids)


def make(cm: FakeCm, state: CmState = CmState.IDLE) -> tuple[SyncCmId, FakeCmId, FakeOwnChannel]:
    raw, channel = cm.raw_id(), cm.open_channel()
    raw.for_requests = None  # type: ignore[attr-defined]
    handle = IdHandle(running_loop(), raw, channel)  # type: ignore[arg-type]
    return SyncCmId(handle, state, None), raw, channel


async def test_a_thread_that_is_late_does_not_reopen_it(cm: FakeCm) -> None:
    cm_id, _, _ = make(cm, CmState.CONNECTING)
    cm_id.abort()
    cm_id._state.current = CmState.CONNECTED
    assert cm_id.state is CmState.CLOSED
    await cm_id.aclose()


async def test_a_request_that_comes_while_it_is_closed_is_rejected(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _, _ = make(cm, CmState.LISTENING)
    request = cm.request_event()
    racing = Racing(listener)
    monkeypatch.setattr(listener._requests, "_requests", racing)
    listener.handle_event(request)
    assert racing == []
    await asyncio.to_thread(cm.ids[request.id].destroyed.wait, TIME_LIMIT)
    await listener.aclose()


class Racing(list[object]):
    """The requests of a listener that is closed just before one is added."""

    def __init__(self, listener: SyncCmId) -> None:
        super().__init__()
        self._listener = listener

    def append(self, request: object) -> None:
        self._listener.abort()
        super().append(request)

    def popleft(self) -> object:
        return self.pop(0)


async def test_requests_come_in_order_and_get_a_channel_each(cm: FakeCm) -> None:
    listener, _, channel = make(cm, CmState.LISTENING)
    waiting = asyncio.create_task(listener.get_request())
    await asyncio.sleep(0.01)
    requests = [cm.request_event(data) for data in (b"one", b"two")]
    for request in requests:
        channel.put(request)
    for number, request in enumerate(requests):
        taken = await (listener.get_request() if number else waiting)
        assert taken.event is request
        assert taken.handle.channel is cm.channels[1 + number]
        assert cm.ids[request.id].calls == ["migrate"]
        await taken.aclose()
    await listener.aclose()


async def test_a_request_for_which_there_is_no_channel_is_rejected(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _, channel = make(cm, CmState.LISTENING)
    channel.put(cm.request_event(b"one"))
    channel.put(cm.request_event(b"two"))

    def none_left() -> FakeOwnChannel:
        raise VerbsError(errno.EMFILE, "rdma_create_event_channel")

    with monkeypatch.context() as patch:
        patch.setattr("aiordma.cm.handle.OwnChannel", none_left)
        with pytest.raises(VerbsError, match="rdma_create_event_channel"):
            await listener.get_request()
    async with await listener.get_request() as request:
        assert request.event is not None
        assert request.event.private_data == b"two"
    await listener.aclose()


async def test_cancelling_while_a_request_is_prepared_loses_nothing(cm: FakeCm) -> None:
    listener, _, channel = make(cm, CmState.LISTENING)
    request = cm.request_event()
    loop, waiting = asyncio.get_running_loop(), asyncio.create_task(listener.get_request())
    cm.ids[request.id].during["migrate"] = lambda: [  # type: ignore[assignment,return-value]
        loop.call_soon_threadsafe(waiting.cancel)
    ]
    channel.put(request)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with await listener.get_request() as taken:
        assert taken.event is request
        assert cm.ids[request.id].calls == ["migrate"]
    await listener.aclose()


async def test_a_listener_is_handed_to_the_loop_as_a_whole(
    cm: FakeCm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, raw, channel = make(cm, CmState.LISTENING)
    request = cm.request_event()
    listener.handle_event(request)

    moved = listener._move_to(cm.dispatcher)  # type: ignore[arg-type]
    assert listener.state is CmState.CLOSED
    assert listener.event_fds() == []
    listener.read_events()  # as who waits for completions does: the loop's events are not its
    assert raw.calls == []
    assert channel.holders == 3  # the id, the loop, and the request
    async with await moved.get_request() as taken:
        assert taken.event is request
    await moved.aclose()


async def test_an_id_that_does_not_listen_leaves_its_channel(cm: FakeCm) -> None:
    cm_id, raw, channel = make(cm)
    cm.dispatcher.read_all = lambda: None  # type: ignore[attr-defined]
    moved = cm_id._move_to(cm.dispatcher)  # type: ignore[arg-type]
    assert raw.calls == ["migrate"]
    assert channel.holders == 0
    await moved.aclose()


async def test_a_removed_device_ends_waiting_for_requests(cm: FakeCm) -> None:
    listener, _, channel = make(cm, CmState.LISTENING)
    waiting = asyncio.create_task(listener.get_request())
    channel.put(event(CmEventType.DEVICE_REMOVAL))
    with pytest.raises(Exception, match="removed"):
        await waiting
    await listener.aclose()


async def test_one_call_at_a_time(cm: FakeCm) -> None:
    cm_id, _, _ = make(cm)
    with cm_id._in_use(), pytest.raises(BusyError), cm_id._in_use():
        raise AssertionError("two at once")
    cm_id.abort()
    with pytest.raises(LocalClosed):
        await cm_id.get_request()
    await cm_id.aclose()
