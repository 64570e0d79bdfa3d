"""Device events: DeviceSubscription in all loops, handlers of queue pairs, and DeviceWatch."""

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
from fakes.cm import fake_cm, raw_of

from aiordma import BusyError, ConnectionOptions, LocalClosed, PeerClosed, RdmaError, VerbsError
from aiordma.cm import CmState
from aiordma.dispatch import (
    DeviceSubscription,
    LoopDevice,
    device_events,
    device_watch,
    failure_of,
)
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
    """A device whose events are those of put(), with a reference count."""

    name = "fake0"
    context = "the context of fake0"
    is_iwarp = False

    def __init__(self) -> None:
        self.async_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.batches: deque[list[AsyncEvent] | VerbsError] = deque()
        self.references = 0
        self.reads = 0
        self._lock = threading.Lock()

    def put(self, *events: AsyncEvent) -> None:
        self.batches.append(list(events))
        os.eventfd_write(self.async_fd, 1)

    def fail(self) -> None:
        """Make all further reads fail, as after a removal."""
        self.batches.append(VerbsError(errno.EIO, "ibv_get_async_event"))
        os.eventfd_write(self.async_fd, 1)

    def get_async_events(self) -> list[AsyncEvent]:
        with self._lock:
            self.reads += 1
            if not self.batches:
                return []
            if isinstance(self.batches[0], VerbsError):
                raise self.batches[0]  # the fd stays readable
            os.eventfd_read(self.async_fd)
            if len(self.batches) > 1:
                os.eventfd_write(self.async_fd, 1)
            batch = self.batches.popleft()
            assert isinstance(batch, list)
            return batch

    def watch_async_events(self) -> int:
        return self.async_fd

    def acquire(self) -> None:
        self.references += 1

    def release(self) -> None:
        self.references -= 1


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    assert not device_events._readers
    assert made.references == 0
    os.close(made.async_fd)


def subscribe(device: Any, handler: Callable[[AsyncEvent], None]) -> DeviceSubscription:
    """Start a subscription on the running loop."""
    made = DeviceSubscription(running_loop(), device, handler)
    made.start()
    return made


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        while not condition():
            await asyncio.sleep(0.001)


def is_watched(device: FakeDevice) -> bool:
    """Return True if the loop watched the device's fd, and stop watching it."""
    return asyncio.get_running_loop().remove_reader(device.async_fd)


# --- subscriptions ---


@pytest.mark.asyncio
async def test_all_subscriptions_of_a_loop_get_each_event(device: FakeDevice) -> None:
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
async def test_subscriptions_of_other_loops_get_each_event(device: FakeDevice) -> None:
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
async def test_a_handler_that_raises_does_not_stop_the_others(
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
async def test_a_device_that_cannot_be_read_counts_as_removed(device: FakeDevice) -> None:
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    device.fail()
    await eventually(lambda: seen == [GONE])
    await asyncio.sleep(0.01)
    assert device.reads == 1
    assert not is_watched(device)
    device_events._device_removed(device)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert seen == [GONE]  # one event, though the removal was detected twice
    assert device.references == 1
    subscription.stop()


@pytest.mark.asyncio
async def test_a_removal_without_an_event_is_dispatched(device: FakeDevice) -> None:
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    await asyncio.to_thread(device_events._device_removed, device)  # type: ignore[arg-type]
    await eventually(lambda: seen == [GONE])
    assert not is_watched(device)
    subscription.stop()


@pytest.mark.asyncio
async def test_a_subscription_after_the_removal_gets_the_event(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_contexts, "is_removed", lambda device: True)
    seen: list[AsyncEvent] = []
    subscription = subscribe(device, seen.append)
    await eventually(lambda: seen == [GONE])
    subscription.stop()


def test_a_subscription_can_be_stopped_after_its_loop_is_closed(device: FakeDevice) -> None:
    async def start() -> DeviceSubscription:
        return subscribe(device, lambda event: None)

    subscription = asyncio.run(start())
    device_events._device_removed(device)  # type: ignore[arg-type]
    subscription.stop()


# --- handlers of queue pairs ---


def test_an_event_is_dispatched_to_the_handlers_of_its_queue_pair_or_queue() -> None:
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
def test_failure_of_returns_an_error_that_names_the_event(kind: AsyncEventType) -> None:
    failure = failure_of(event(kind, 0x10))
    assert type(failure) is RdmaError
    assert kind.name in str(failure)


def test_failure_of_other_events_is_none() -> None:
    assert [failure_of(event(kind)) for kind in (E.COMM_EST, E.SQ_DRAINED, E.PORT_ERR)] == [
        None
    ] * 3


@pytest.mark.asyncio
async def test_a_removed_device_fails_each_handler_once(device: FakeDevice) -> None:
    loop_device = LoopDevice(running_loop(), device)  # type: ignore[arg-type]
    failures: list[VerbsError] = []
    loop_device.attach(SimpleNamespace(complete=None, device_failed=failures.append))
    for _ in range(2):
        loop_device._on_device_event(GONE)
    assert [error.errno for error in failures] == [errno.ENODEV]
    loop_device._on_device_event(DOWN)
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
async def test_a_disconnect_after_a_queue_pair_event_is_the_cause(
    endpoint: MessageEndpoint,
) -> None:
    endpoint.queue_pair_event(event(E.QP_REQ_ERR, 0x10))
    endpoint.cm.handle_event(CmEvent(CmEventType.DISCONNECTED, 0))
    await asyncio.sleep(0.1)
    endpoint._expect_no_completions()
    with pytest.raises(PeerClosed):
        await endpoint.data_path.receiver.recv()


@pytest.mark.parametrize("endpoint", [CmState.ACCEPTING], indirect=True)
@pytest.mark.asyncio
async def test_received_data_establishes_an_accepting_connection(
    endpoint: MessageEndpoint,
) -> None:
    endpoint.queue_pair_event(event(E.COMM_EST, 0x10))
    assert raw_of(endpoint.cm).calls == ["notify"]


@pytest.mark.asyncio
async def test_received_data_does_not_establish_a_connection_again(
    endpoint: MessageEndpoint,
) -> None:
    endpoint.queue_pair_event(event(E.COMM_EST, 0x10))
    assert raw_of(endpoint.cm).calls == []


# --- DeviceWatch ---


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
    monkeypatch.setattr(device_watch, "initialise", initialise)
    monkeypatch.setattr(device_watch, "DeviceReference", FakeReferenceClass(made))
    return made


class FakeReferenceClass:
    """A fake of the class DeviceReference, with one instance."""

    def __init__(self, made: FakeReference) -> None:
        self._made = made

    def __call__(self) -> FakeReference:
        return self._made

    def close(self, reference: FakeReference) -> None:
        reference.close()


@pytest.mark.asyncio
async def test_a_watch_returns_events_in_order(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with device_watch.watch_devices() as watch:
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
    async with device_watch.watch_devices() as watch:
        device.put(DOWN)
        device.fail()
        assert [one async for one in watch] == [DOWN, GONE]
        assert watch.devices == ()
        assert device.references == 0  # before the end of the block


@pytest.mark.asyncio
async def test_a_task_cancelled_while_it_is_woken_loses_no_event(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with device_watch.watch_devices() as watch:
        task = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        watch._append(DOWN, device)  # type: ignore[arg-type]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await anext(watch) == DOWN


@pytest.mark.asyncio
async def test_a_second_task_that_waits_gets_busy_error(
    device: FakeDevice, reference: FakeReference
) -> None:
    async with device_watch.watch_devices() as watch:
        task = asyncio.ensure_future(anext(watch, None))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await anext(watch)
    assert await task is None


@pytest.mark.asyncio
async def test_a_watch_can_be_entered_only_once(
    device: FakeDevice, reference: FakeReference
) -> None:
    watch = device_watch.watch_devices()
    with pytest.raises(LocalClosed, match="entered"):
        await anext(watch)
    async with watch:
        pass
    with pytest.raises(LocalClosed, match="once"):
        await watch.__aenter__()


@pytest.mark.asyncio
async def test_a_watch_that_fails_to_start_stops_its_subscriptions(
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
        async with device_watch.watch_devices():
            pytest.fail("it was entered")
    await eventually(reference.closed.is_set)
    os.close(closed.async_fd)
