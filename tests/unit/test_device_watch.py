"""Device events: to every loop that asked, to the queue pair's owner, and to those who watch."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from cm_fakes import fake_cm, raw_of

from aiordma import BusyError, ConnectionOptions, LocalClosed, PeerClosed, RdmaError, VerbsError
from aiordma.cm import CmState
from aiordma.dispatch import DeviceSubscription, LoopDevice, device_events, failure_of
from aiordma.dispatch import device_watch as watching
from aiordma.dispatch.queue_pair_events import QueuePairEvents
from aiordma.enums import AsyncEventType, CmEventType
from aiordma.loop import running_loop
from aiordma.messages.connection import MessageEndpoint, message_endpoint
from aiordma.qp import endpoint as endpoint_module
from aiordma.rdmacm import CmEvent, device_contexts
from aiordma.verbs import AsyncEvent, DeviceAttributes

E = AsyncEventType
TIME_LIMIT = 10


def event(kind: AsyncEventType, element: int = 0) -> AsyncEvent:
    return AsyncEvent("fake0", kind, 0 if element else 1, element)


GONE = AsyncEvent("fake0", E.DEVICE_FATAL)
DOWN, UP = event(E.PORT_ERR), event(E.PORT_ACTIVE)


class FakeDevice:
    """A device with events that were put there, and a count of who holds it."""

    name = "fake0"
    context = "the context of fake0"
    is_iwarp = False

    def __init__(self) -> None:
        self.async_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.batches: deque[list[AsyncEvent] | VerbsError] = deque()
        self.holders = 0
        self.reads = 0
        self._lock = threading.Lock()

    def put(self, *events: AsyncEvent) -> None:
        self.batches.append(list(events))
        os.eventfd_write(self.async_fd, 1)

    def fail(self) -> None:
        self.batches.append(VerbsError(errno.EIO, "ibv_get_async_event"))
        os.eventfd_write(self.async_fd, 1)

    def get_async_events(self) -> list[AsyncEvent]:
        with self._lock:
            self.reads += 1
            if not self.batches:
                return []
            if isinstance(self.batches[0], VerbsError):
                raise self.batches[0]  # stays readable
            os.eventfd_read(self.async_fd)
            if len(self.batches) > 1:
                os.eventfd_write(self.async_fd, 1)
            batch = self.batches.popleft()
            assert isinstance(batch, list)
            return batch

    def watch_async_events(self) -> int:
        return self.async_fd

    def acquire(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    assert not device_events._readers
    assert made.holders == 0
    os.close(made.async_fd)


def subscribe(device: Any, handler: Callable[[AsyncEvent], None]) -> DeviceSubscription:
    made = DeviceSubscription(running_loop(), device, handler)
    made.start()
    return made


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        while not condition():
            await asyncio.sleep(0.001)


def is_watched(device: FakeDevice) -> bool:
    return asyncio.get_running_loop().remove_reader(device.async_fd)


# --- to every loop ---


@pytest.mark.asyncio
async def test_all_who_asked_are_told_by_one_reader(device: FakeDevice) -> None:
    seen: list[list[AsyncEvent]] = [[], []]
    subscriptions = [subscribe(device, one.append) for one in seen]
    device.put(DOWN, UP)
    await eventually(lambda: bool(seen[1]))
    assert seen == [[DOWN, UP], [DOWN, UP]]
    subscriptions[0].stop()
    device.put(DOWN)
    await eventually(lambda: len(seen[1]) == 3)
    assert len(seen[0]) == 2
    subscriptions[1].stop()
    subscriptions[1].stop()
    assert not is_watched(device)


@pytest.mark.asyncio
async def test_other_loops_are_told_too(device: FakeDevice) -> None:
    async def watch_one() -> None:
        subscription = subscribe(device, there.append)
        ready.set()
        await eventually(lambda: len(there) == 3)
        subscription.stop()

    here: list[AsyncEvent] = []
    there: list[AsyncEvent] = []
    ready = threading.Event()
    subscription = subscribe(device, here.append)
    other = asyncio.create_task(asyncio.to_thread(asyncio.run, watch_one()))
    await eventually(ready.is_set)
    for one in (DOWN, UP, DOWN):
        device.put(one)
    await other
    await eventually(lambda: len(here) == 3)
    assert sorted(map(str, here)) == sorted(map(str, there)) == sorted(map(str, [DOWN, UP, DOWN]))
    subscription.stop()


@pytest.mark.asyncio
async def test_a_handler_that_fails_keeps_nothing_from_others(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[AsyncEvent] = []
    broken: Any = lambda event: 1 // 0  # noqa: E731
    subscriptions = [subscribe(device, broken), subscribe(device, seen.append)]
    device.put(DOWN, UP)
    await eventually(lambda: seen == [DOWN, UP])
    assert "could not handle PORT_ERR of fake0" in caplog.text
    for subscription in subscriptions:
        subscription.stop()


@pytest.mark.asyncio
async def test_a_device_that_cannot_be_read_is_removed_and_read_no_more(device: FakeDevice) -> None:
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    device.fail()
    await eventually(lambda: seen == [GONE])
    await asyncio.sleep(0.01)
    assert device.reads == 1
    assert not is_watched(device)
    device_events._device_removed(device)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert seen == [GONE]  # told once, however often it is found
    assert device.holders == 1
    subscription.stop()


@pytest.mark.asyncio
async def test_a_removal_that_the_device_does_not_tell(device: FakeDevice) -> None:
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    await asyncio.to_thread(device_events._device_removed, device)  # type: ignore[arg-type]
    await eventually(lambda: seen == [GONE])
    assert not is_watched(device)
    subscription.stop()


@pytest.mark.asyncio
async def test_who_asks_too_late_is_told_of_the_removal_all_the_same(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_contexts, "is_gone", lambda device: True)
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    await eventually(lambda: seen == [GONE])
    subscription.stop()


def test_a_subscription_outlives_its_loop(device: FakeDevice) -> None:
    async def start() -> DeviceSubscription:
        return subscribe(device, lambda event: None)

    subscription = asyncio.run(start())
    device_events._device_removed(device)  # type: ignore[arg-type]
    subscription.stop()


# --- to the queue pair's owner ---


def owned(
    pairs: QueuePairEvents, key: int, qp: int, cq: int, tell: Callable[[AsyncEvent], None]
) -> None:
    pairs._handlers[key] = {qp, cq}, tell


def test_an_event_goes_to_the_owners_of_what_it_is_about() -> None:
    pairs = QueuePairEvents()
    seen: dict[int, list[AsyncEvent]] = {1: [], 2: [], 3: []}
    for key, qp, cq in ((1, 0x10, 0xA0), (2, 0x20, 0xA0), (3, 0x30, 0xB0)):
        pairs._handlers[key] = {qp, cq}, seen[key].append
    pairs.dispatch(event(E.COMM_EST, 0x20))
    assert [len(one) for one in seen.values()] == [0, 1, 0]
    pairs.dispatch(event(E.CQ_ERR, 0xA0))
    assert [len(one) for one in seen.values()] == [1, 2, 0]
    pairs.remove(1)
    pairs.dispatch(event(E.CQ_ERR, 0xA0))
    pairs.dispatch(event(E.PORT_ERR))
    assert [len(one) for one in seen.values()] == [1, 3, 0]


@pytest.mark.parametrize("kind", [E.QP_FATAL, E.QP_REQ_ERR, E.QP_ACCESS_ERR, E.CQ_ERR])
def test_what_ends_a_connection_says_so(kind: AsyncEventType) -> None:
    failure = failure_of(event(kind, 0x10))
    assert type(failure) is RdmaError
    assert kind.name in str(failure)


def test_what_ends_no_connection() -> None:
    assert [failure_of(event(kind)) for kind in (E.COMM_EST, E.SQ_DRAINED, E.PORT_ERR)] == [
        None
    ] * 3


@pytest.mark.asyncio
async def test_a_removed_device_fails_all_on_it_once(device: FakeDevice) -> None:
    shared = LoopDevice(running_loop(), device)  # type: ignore[arg-type]
    failures: list[VerbsError] = []
    shared.attach(SimpleNamespace(complete=None, device_failed=failures.append))
    for _ in range(2):
        shared._on_device_event(GONE)
    assert [error.errno for error in failures] == [errno.ENODEV]
    shared._on_device_event(DOWN)
    assert len(failures) == 1


class ShallowDevice:
    name = "shallow0"
    is_iwarp = False
    attributes = DeviceAttributes(100, 4, 1000, 1 << 30, 1, 1)


@pytest_asyncio.fixture(params=[CmState.CONNECTED])
async def endpoint(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MessageEndpoint]:
    monkeypatch.setattr(endpoint_module, "CAUSE_SECONDS", 0.05)
    with fake_cm(running_loop(), monkeypatch) as made:
        cm_id = made.make_id(request.param)
        monkeypatch.setattr(raw_of(cm_id), "device", ShallowDevice, raising=False)
        connected = message_endpoint(cm_id, ConnectionOptions(send_depth=10, recv_depth=10))
        yield connected
        connected.abort()
        await cm_id.aclose()


@pytest.mark.asyncio
async def test_a_queue_pair_that_failed_ends_the_connection(endpoint: MessageEndpoint) -> None:
    endpoint.queue_pair_event(event(E.QP_FATAL, 0x10))
    assert not endpoint.closed
    await eventually(lambda: endpoint.closed)
    with pytest.raises(RdmaError, match="QP_FATAL"):
        await endpoint.data_path.receiver.recv()


@pytest.mark.asyncio
async def test_what_says_more_than_the_event_is_the_cause(endpoint: MessageEndpoint) -> None:
    endpoint.queue_pair_event(event(E.QP_REQ_ERR, 0x10))
    endpoint.cm.handle_event(CmEvent(CmEventType.DISCONNECTED, 0))
    await asyncio.sleep(0.1)
    endpoint._expect_no_completions()
    with pytest.raises(PeerClosed):
        await endpoint.data_path.receiver.recv()


@pytest.mark.parametrize("endpoint", [CmState.ACCEPTING], indirect=True)
@pytest.mark.asyncio
async def test_data_that_came_establishes_the_connection(endpoint: MessageEndpoint) -> None:
    endpoint.queue_pair_event(event(E.COMM_EST, 0x10))
    assert raw_of(endpoint.cm).calls == ["notify"]


@pytest.mark.asyncio
async def test_a_connection_that_stands_need_not_be_established(
    endpoint: MessageEndpoint,
) -> None:
    endpoint.queue_pair_event(event(E.COMM_EST, 0x10))
    assert raw_of(endpoint.cm).calls == []


# --- to those who watch ---


class FakeReference:
    def __init__(self, devices: list[FakeDevice]) -> None:
        self.devices = devices
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def reference(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeReference:
    async def initialise(loop: object) -> None:
        return

    made = FakeReference([device])
    monkeypatch.setattr(watching, "initialise", initialise)
    monkeypatch.setattr(watching, "DeviceReference", _Maker(made))
    return made


class _Maker:
    """DeviceReference, of which there is one."""

    def __init__(self, made: FakeReference) -> None:
        self._made = made

    def __call__(self) -> FakeReference:
        return self._made

    def close(self, reference: FakeReference) -> None:
        reference.close()


@pytest.mark.asyncio
async def test_a_watch_gives_what_comes_in_order(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with watching.watch_devices() as watch:
        assert watch.devices == ("fake0",)
        assert repr(watch) == "<DeviceWatch of fake0>"
        device.put(DOWN, UP)
        device.put(DOWN)
        assert [await anext(watch) for _ in range(3)] == [DOWN, UP, DOWN]
    await eventually(reference.closed.is_set)
    assert [one async for one in watch] == []


@pytest.mark.asyncio
async def test_a_watch_ends_with_its_last_device(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with watching.watch_devices() as watch:
        device.put(DOWN)
        device.fail()
        assert [one async for one in watch] == [DOWN, GONE]
        assert watch.devices == ()
        assert device.holders == 0  # the block need not be left for that


@pytest.mark.asyncio
async def test_a_task_cancelled_as_it_is_woken_takes_nothing_away(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with watching.watch_devices() as watch:
        task = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        watch._append(DOWN, device)  # type: ignore[arg-type]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await anext(watch) == DOWN


@pytest.mark.asyncio
async def test_one_task_watches(device: FakeDevice, reference: FakeReference) -> None:
    async with watching.watch_devices() as watch:
        task = asyncio.ensure_future(anext(watch, None))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await anext(watch)
    assert await task is None


@pytest.mark.asyncio
async def test_a_watch_is_for_one_block(device: FakeDevice, reference: FakeReference) -> None:
    watch = watching.watch_devices()
    with pytest.raises(LocalClosed, match="entered"):
        await anext(watch)
    async with watch:
        pass
    with pytest.raises(LocalClosed, match="once"):
        await watch.__aenter__()


@pytest.mark.asyncio
async def test_a_watch_that_cannot_begin_leaves_nothing(
    device: FakeDevice, reference: FakeReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = FakeDevice()
    closed.name = "closed0"
    failure = VerbsError(errno.EBADF, "fcntl")

    def fail() -> int:
        raise failure

    monkeypatch.setattr(closed, "watch_async_events", fail)
    reference.devices.append(closed)
    with pytest.raises(VerbsError):
        async with watching.watch_devices():
            pytest.fail("it was entered")
    await eventually(reference.closed.is_set)
    os.close(closed.async_fd)
