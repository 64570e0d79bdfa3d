"""Listener and ConnectRequest, on fake ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fakes.cm import FakeCm, event, fake_cm, raw_of

from aiordma import (
    BusyError,
    ConnectError,
    ConnectionOptions,
    ConnectRequest,
    DeviceRemoved,
    Listener,
    LocalClosed,
)
from aiordma.cm import AsyncCmId, CmState
from aiordma.enums import CmEventType
from aiordma.loop import running_loop
from aiordma.messages.listener import SharedReceivesByDevice

pytestmark = pytest.mark.asyncio

OPTIONS = ConnectionOptions()


@pytest_asyncio.fixture
async def cm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCm]:
    with fake_cm(running_loop(), monkeypatch) as made:
        yield made


@pytest_asyncio.fixture
async def ids(cm: FakeCm) -> AsyncIterator[list[AsyncCmId]]:
    """Make two ids that listen, one for each address family."""
    made = [cm.make_id(), cm.make_id()]
    for cm_id in made:
        cm_id.listen()
    yield made
    for cm_id in made:
        await cm_id.aclose()


@pytest.fixture
def listener(ids: list[AsyncCmId]) -> Listener:
    return Listener(ids, OPTIONS)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def no_handler(connection: object) -> None:
    raise AssertionError("no connection was expected")


async def test_requests_come_from_every_id(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    for number in (0, 1, 0, 1):
        task = asyncio.create_task(listener.get_request())
        await settle()
        ids[number].handle_event(cm.request_event(b"hello"))
        request = await task
        assert request.private_data == b"hello"
        assert request.peer_address == ("10.7.1.2", 7471)
        assert request.local_address == ("10.7.1.1", 4711)
        await request.reject()


async def test_waiting_requests_are_returned_one_by_one(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    for data in (b"one", b"two"):
        ids[0].handle_event(cm.request_event(data))
    ids[1].handle_event(cm.request_event(b"three"))
    seen = []
    for _ in range(3):
        request = await listener.get_request()
        seen.append(request.private_data)
        await request.reject()
    assert seen == [b"one", b"two", b"three"]


async def test_cancelling_loses_no_request(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    task = asyncio.create_task(listener.get_request())
    await settle()
    ids[1].handle_event(cm.request_event(b"mine"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    request = await listener.get_request()
    assert request.private_data == b"mine"
    await request.reject()


async def test_a_second_task_that_waits_for_requests_gets_a_busy_error(listener: Listener) -> None:
    task = asyncio.create_task(listener.get_request())
    await settle()
    with pytest.raises(BusyError):
        await listener.get_request()
    listener.abort()
    with pytest.raises(LocalClosed):
        await task


async def test_closing_ends_the_iteration(listener: Listener) -> None:
    async def iterate() -> list[ConnectRequest]:
        return [request async for request in listener]

    task = asyncio.create_task(iterate())
    await settle()
    await listener.aclose()
    assert await task == []
    with pytest.raises(LocalClosed):
        await listener.get_request()


async def test_closing_closes_every_id(ids: list[AsyncCmId], listener: Listener) -> None:
    async with listener:
        pass
    await listener.aclose()
    assert [raw_of(cm_id).calls for cm_id in ids] == [["migrate", "listen", "destroy"]] * 2


async def test_serve_returns_when_the_listener_is_closed(listener: Listener) -> None:
    task = asyncio.create_task(listener.serve(no_handler))
    await settle()
    listener.abort()
    await task


async def test_serve_while_another_task_waits_leaves_the_listener_open(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    task = asyncio.create_task(listener.get_request())
    await settle()
    with pytest.raises(BusyError):
        await listener.serve(no_handler)
    assert {cm_id.state for cm_id in ids} == {CmState.LISTENING}
    ids[0].handle_event(cm.request_event(b"hello"))
    request = await task
    assert request.private_data == b"hello"
    await request.reject()


def request_of_a_peer_that_gave_up(
    cm: FakeCm, cm_id: AsyncCmId, monkeypatch: pytest.MonkeyPatch
) -> AsyncCmId:
    """Add a request to `cm_id` whose peer gives up before the request is taken. Return its id."""
    cm_id.handle_event(cm.request_event())
    child = cm_id.take_request()
    assert child is not None
    child.handle_event(event(CmEventType.REJECTED, 4))
    requests = [child]
    monkeypatch.setattr(cm_id, "take_request", lambda: requests.pop() if requests else None)
    return child


async def test_serve_skips_a_peer_that_gave_up(
    cm: FakeCm,
    ids: list[AsyncCmId],
    listener: Listener,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "aiordma")
    child = request_of_a_peer_that_gave_up(cm, ids[0], monkeypatch)
    task = asyncio.create_task(listener.serve(no_handler))
    await settle()
    assert not task.done()
    assert child.state is CmState.CLOSED
    listener.abort()
    await task
    await child.aclose()
    assert " ended: " in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


async def test_cancelling_serve_stops_listening(ids: list[AsyncCmId], listener: Listener) -> None:
    task = asyncio.create_task(listener.serve(no_handler))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {cm_id.state for cm_id in ids} == {CmState.CLOSED}


async def test_serve_raises_what_get_request_raises(
    ids: list[AsyncCmId], listener: Listener
) -> None:
    task = asyncio.create_task(listener.serve(no_handler))
    await settle()
    ids[0].handle_event(event(CmEventType.DEVICE_REMOVAL))
    with pytest.raises(DeviceRemoved):
        await task
    assert {cm_id.state for cm_id in ids} == {CmState.CLOSED}


async def test_serve_waits_for_its_handlers_before_it_raises(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def serve_one(request: ConnectRequest, *_: object) -> None:
        begun.set()
        await gate.wait()
        await request.reject()

    monkeypatch.setattr(listener, "_serve_one", serve_one)
    task = asyncio.create_task(listener.serve(no_handler))
    ids[0].handle_event(cm.request_event())
    await begun.wait()
    ids[1].handle_event(event(CmEventType.DEVICE_REMOVAL))
    await settle()
    assert not task.done()
    gate.set()
    with pytest.raises(DeviceRemoved):
        await task


async def test_a_rejected_request_cannot_be_answered_again(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    ids[0].handle_event(cm.request_event())
    request = await listener.get_request()
    await request.reject(b"no")
    with pytest.raises(LocalClosed, match="answered already"):
        await request.reject()
    with pytest.raises(LocalClosed, match="answered already"):
        await request.accept()


async def test_a_request_can_be_answered_after_private_data_that_does_not_fit(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener
) -> None:
    ids[0].handle_event(cm.request_event())
    request = await listener.get_request()
    with pytest.raises(ValueError, match="at most 196"):
        await request.accept(bytes(197))
    with pytest.raises(ValueError, match="at most 148"):
        await request.reject(bytes(149))
    await request.reject(bytes(148))


async def test_accepting_a_peer_that_gave_up_raises_a_connect_error(cm: FakeCm) -> None:
    async with cm.make_request() as cm_id:
        request = ConnectRequest(cm_id, OPTIONS, SharedReceivesByDevice(OPTIONS))
        cm_id.handle_event(event(CmEventType.REJECTED, 4))
        with pytest.raises(ConnectError):
            await request.accept(bytes(1000))
        assert cm_id.state is CmState.CLOSED
        with pytest.raises(LocalClosed, match="answered already"):
            await request.accept()


@pytest.mark.parametrize("kind", [CmEventType.REJECTED, CmEventType.DEVICE_REMOVAL])
async def test_rejecting_a_peer_that_gave_up_closes_its_id(cm: FakeCm, kind: CmEventType) -> None:
    async with cm.make_request() as cm_id:
        request = ConnectRequest(cm_id, OPTIONS, SharedReceivesByDevice(OPTIONS))
        cm_id.handle_event(event(kind, 4))
        await request.reject(b"no")
        assert cm_id.state is CmState.CLOSED
        with pytest.raises(LocalClosed, match="answered already"):
            await request.reject()
    assert raw_of(cm_id).calls == ["destroy"]


async def test_accept_skips_a_peer_whose_device_was_removed(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The listener can have ids on other devices.
    async def accept(self: ConnectRequest, private_data: bytes) -> None:
        await self._cm.aclose()
        raise DeviceRemoved("removed")

    monkeypatch.setattr(ConnectRequest, "accept", accept)
    task = asyncio.create_task(listener.accept())
    ids[0].handle_event(cm.request_event())
    await settle()
    assert not task.done()
    listener.abort()
    with pytest.raises(LocalClosed):
        await task


async def test_accept_skips_a_peer_that_gave_up(
    cm: FakeCm, ids: list[AsyncCmId], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = request_of_a_peer_that_gave_up(cm, ids[0], monkeypatch)
    task = asyncio.create_task(listener.accept())
    try:
        await settle()
        assert not task.done()
        assert child.state is CmState.CLOSED
    finally:
        listener.abort()
        await asyncio.gather(task, return_exceptions=True)
        await child.aclose()
