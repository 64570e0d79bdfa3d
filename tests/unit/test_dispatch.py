"""CmDispatcher and LoopDevice: events and completions reach their handlers; failures end waits."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import pytest_asyncio
from fakes.cm import PEER, FakeCmId

from aiordma import DeviceRemoved, Listener, LocalClosed, RdmaError, VerbsError
from aiordma.cm import AsyncCmId, CmState
from aiordma.dispatch import KEY_SHIFT, CmDispatcher, LoopDevice, cm_events, loop_device
from aiordma.enums import CmEventType
from aiordma.loop import make_future, running_loop
from aiordma.options import ConnectionOptions
from aiordma.rdmacm import CmEvent, CmId
from aiordma.verbs.completion import POLL_BATCH

pytestmark = pytest.mark.asyncio

E, S = CmEventType, CmState
TIME_LIMIT = 10


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let the event loop run a few iterations."""
    for _ in range(5):
        await asyncio.sleep(0)


class ReadableFd:
    """A file descriptor that is readable after set(), until clear()."""

    def __init__(self, flags: int = 0) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | flags)
        self._watched_by = asyncio.get_running_loop()

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)

    def stop_watching(self) -> bool:
        """Stop watching the fd. Return True if the loop watched it until now."""
        return self._watched_by.remove_reader(self.fd)


class FakeEventChannel(ReadableFd):
    """An event channel whose batches are those of put(). A VerbsError is raised instead."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: deque[list[CmEvent] | VerbsError] = deque()
        self.reads = 0
        self.closed = False

    def put(self, batch: list[CmEvent] | VerbsError) -> None:
        self.batches.append(batch)
        self.set()

    def get_events(self) -> list[CmEvent]:
        self.reads += 1
        batch = self.batches.popleft()
        if isinstance(batch, VerbsError):
            raise batch  # the fd stays readable, as that of a removed device
        self.clear()
        return batch

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        self.closed = True


class FakeOwnChannel(FakeEventChannel):
    """The channel of a listening id, with a reference count."""

    created: ClassVar[list[FakeOwnChannel]] = []

    def __init__(self) -> None:
        super().__init__()
        self.references = 1
        self.lock = threading.Lock()
        self.created.append(self)

    def acquire(self) -> FakeOwnChannel:
        assert not self.closed
        with self.lock:
            self.references += 1
        return self

    def release(self) -> None:
        """Drop a reference, in any thread. The last one can be that of a request's id."""
        with self.lock:
            self.references -= 1
            if self.references:
                return
        assert not self.stop_watching(), "closed under the loop"
        self.close()


class Cm:
    """The running loop's dispatcher on a fake channel, and real ids whose C side is fake."""

    def __init__(self) -> None:
        self.dispatcher = CmDispatcher(running_loop())
        cm_events._dispatchers[running_loop()] = self.dispatcher
        channel = self.dispatcher._channel
        assert isinstance(channel, FakeEventChannel)
        self.channel = channel
        self.raw: dict[int, FakeCmId] = {}
        self.ids: list[AsyncCmId] = []

    def create(self, channel: object = None, port_space: object = None) -> FakeCmId:
        made = FakeCmId(0x1000 + 0x100 * len(self.raw))
        self.raw[made.address] = made
        return made

    async def make_id(self) -> AsyncCmId:
        self.ids.append(await AsyncCmId.create())
        return self.ids[-1]

    async def resolving(self) -> tuple[AsyncCmId, asyncio.Task[None]]:
        """Return an id and a task that waits in its resolve_addr()."""
        cm_id = await self.make_id()
        task = asyncio.create_task(cm_id.resolve_addr(PEER))
        await eventually(lambda: len(cm_id._changed) == 1)
        return cm_id, task

    def event(self, kind: CmEventType, cm_id: AsyncCmId, **more: Any) -> CmEvent:
        return CmEvent(kind, cm_id.cm_id.address, **more)

    def request(self, listener: AsyncCmId, child: FakeCmId) -> CmEvent:
        address = listener.cm_id.address
        return CmEvent(E.CONNECT_REQUEST, child.address, listen_id=address)


@pytest_asyncio.fixture
async def cm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cm]:
    monkeypatch.setattr(cm_events, "EventChannel", FakeEventChannel)
    monkeypatch.setattr(cm_events, "_initialised", True)
    made = Cm()
    monkeypatch.setattr(CmId, "create", made.create)
    monkeypatch.setattr(CmId, "from_address", lambda address: made.raw[address])
    monkeypatch.setattr("aiordma.cm.handle.OwnChannel", FakeOwnChannel)
    FakeOwnChannel.created.clear()
    with made.dispatcher.referenced():
        yield made
        for cm_id in made.ids:
            await cm_id.aclose()
        assert not is_closed(made.channel)
    assert is_closed(made.channel)
    await eventually(lambda: all(channel.closed for channel in FakeOwnChannel.created))
    assert running_loop() not in cm_events._dispatchers


def is_closed(channel: FakeEventChannel) -> bool:
    """Return channel.closed, as a call because mypy assumes that an attribute does not change."""
    return channel.closed


def wait_until_read(channel: FakeEventChannel) -> None:
    """Block the worker thread until the loop has read all batches of the channel."""
    deadline = time.monotonic() + TIME_LIMIT
    while channel.batches and time.monotonic() < deadline:
        time.sleep(0.001)


# --- events of ids ---


async def test_an_event_is_dispatched_to_its_id(cm: Cm) -> None:
    (first, task), (second, other) = await cm.resolving(), await cm.resolving()
    cm.channel.put([cm.event(E.ADDR_ERROR, second), cm.event(E.ADDR_RESOLVED, first)])
    await task
    with pytest.raises(RdmaError, match="no RDMA path"):
        await other
    assert (first.state, second.state) == (S.ADDR_RESOLVED, S.ADDR_BOUND)


async def test_an_event_of_a_closed_id_is_dropped(cm: Cm) -> None:
    closed, (cm_id, task) = await cm.make_id(), await cm.resolving()
    await closed.aclose()
    cm.channel.put([cm.event(E.ADDR_RESOLVED, closed), cm.event(E.ADDR_RESOLVED, cm_id)])
    await task


async def test_an_event_whose_handler_raises_does_not_stop_the_next_events(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
    broken, (cm_id, task) = await cm.make_id(), await cm.resolving()
    broken.on_change = lambda: 1 // 0  # type: ignore[assignment]
    cm.channel.put([cm.event(E.ADDR_CHANGE, broken), cm.event(E.ADDR_RESOLVED, cm_id)])
    await task
    broken.on_change = None
    assert "could not handle ADDR_CHANGE" in caplog.text


async def test_a_request_for_a_closing_listener_is_rejected(cm: Cm) -> None:
    """The id of the request is destroyed before its channel is closed."""
    listener = await cm.make_id()
    listener.listen()
    [channel] = FakeOwnChannel.created
    request_id, closed_first = cm.create(), list[bool]()
    request_id.during["destroy"] = lambda: closed_first.append(channel.closed)
    channel.put([cm.request(listener, request_id)])
    cm.raw[listener.cm_id.address].during["destroy"] = lambda: wait_until_read(channel)
    await listener.aclose()
    await eventually(request_id.destroyed.is_set)
    assert closed_first == [False]
    await eventually(lambda: channel.closed)


async def test_a_listener_gets_the_events_of_its_own_channel(cm: Cm) -> None:
    listener, other = await cm.make_id(), await cm.make_id()
    listener.listen()
    [channel] = FakeOwnChannel.created
    request_id = cm.create()
    channel.put([cm.request(listener, request_id), cm.event(E.DEVICE_REMOVAL, listener)])
    await eventually(lambda: listener.state is S.REMOVED)
    assert other.state is S.IDLE
    async with await listener.get_request() as request:
        raw: object = request.cm_id
        assert raw is request_id
        assert request_id.calls == ["migrate"]


async def test_a_failed_channel_of_a_listener_ends_only_that_listener(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = await cm.make_id(), await cm.make_id()
    listener.listen()
    task = asyncio.create_task(listener.get_request())
    await settle()
    [channel] = FakeOwnChannel.created
    channel.put(GONE)
    with pytest.raises(DeviceRemoved, match=os.strerror(errno.EIO)):
        await asyncio.wait_for(task, TIME_LIMIT)
    assert not channel.stop_watching()
    assert other.state is S.IDLE
    assert "channel of a listener failed" in caplog.text


async def test_listen_without_a_channel_raises_and_can_be_called_again(
    cm: Cm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = await cm.make_id()
    with monkeypatch.context() as patch:
        patch.setattr("aiordma.cm.handle.OwnChannel", too_many_files)
        with pytest.raises(VerbsError) as caught:
            listener.listen()
    assert caught.value.errno == errno.EMFILE
    assert listener.state is S.IDLE
    listener.listen()


def too_many_files() -> object:
    raise VerbsError(errno.EMFILE, "rdma_create_event_channel")


# --- a channel that fails ---


GONE = VerbsError(errno.EIO, "rdma_get_cm_event")


async def test_a_failed_channel_ends_all_waits(cm: Cm, caplog: pytest.LogCaptureFixture) -> None:
    (first, one), (second, two) = await cm.resolving(), await cm.resolving()
    cm.channel.put(GONE)
    for task in (one, two):
        with pytest.raises(DeviceRemoved, match=os.strerror(errno.EIO)):
            await asyncio.wait_for(task, TIME_LIMIT)
    assert {first.state, second.state} == {S.REMOVED}
    assert first.event is not None
    assert first.event.errno == errno.EIO
    assert "event channel failed, and all its ids with it: " in caplog.text
    assert "rdma_get_cm_event" in caplog.text


async def test_a_failed_channel_ends_listening(cm: Cm) -> None:
    ids = [await cm.make_id(), await cm.make_id()]
    for cm_id in ids:
        cm_id.listen()
    listener = Listener(ids, ConnectionOptions())
    task = asyncio.create_task(listener.get_request())
    await settle()
    cm.channel.put(GONE)
    with pytest.raises(DeviceRemoved):
        await asyncio.wait_for(task, TIME_LIMIT)


async def test_a_failed_channel_is_not_read_again(cm: Cm) -> None:
    await cm.make_id()
    cm.channel.put(GONE)
    await eventually(lambda: cm.channel.reads == 1)
    await asyncio.sleep(0.01)
    assert cm.channel.reads == 1
    assert not cm.channel.stop_watching()


async def test_ids_can_be_closed_after_their_channel_failed(cm: Cm) -> None:
    closed, (cm_id, task) = await cm.make_id(), await cm.resolving()
    await closed.aclose()
    cm.channel.put(GONE)
    with pytest.raises(DeviceRemoved):
        await task
    assert closed.state is S.CLOSED
    await cm_id.aclose()
    with pytest.raises(LocalClosed):
        await cm_id.resolve_addr(PEER)


async def test_an_id_that_raises_on_the_failure_does_not_stop_the_others(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
    broken, (_, task) = await cm.make_id(), await cm.resolving()
    broken.on_change = lambda: 1 // 0  # type: ignore[assignment]
    cm.channel.put(GONE)
    with pytest.raises(DeviceRemoved):
        await asyncio.wait_for(task, TIME_LIMIT)
    broken.on_change = None
    assert broken.state is S.REMOVED
    assert "could not handle DEVICE_REMOVAL" in caplog.text


async def test_an_id_created_after_the_failure_has_a_new_channel(cm: Cm) -> None:
    old = await cm.make_id()
    cm.channel.put(GONE)
    await eventually(lambda: cm.channel.reads == 1)
    new, task = await cm.resolving()
    dispatcher = cm_events._dispatchers[running_loop()]
    assert dispatcher is not cm.dispatcher
    channel = dispatcher._channel
    assert isinstance(channel, FakeEventChannel)
    await old.aclose()
    assert cm_events._dispatchers[running_loop()] is dispatcher
    channel.put([cm.event(E.ADDR_RESOLVED, new)])
    await asyncio.wait_for(task, TIME_LIMIT)
    await new.aclose()
    assert channel.closed
    assert not cm.channel.closed


# --- completions ---


@dataclass
class FakeWc:
    wr_id: int


class FakeDevice:
    name = "fake0"
    is_iwarp = False


class FakeCompletionChannel(ReadableFd):
    """A completion channel whose events are those of put(): names of queues, or a VerbsError."""

    def __init__(self) -> None:
        super().__init__(os.EFD_SEMAPHORE)
        self.ready: deque[str | VerbsError] = deque()
        self.reads = 0

    def put(self, events: list[str] | VerbsError) -> None:
        for event in [events] if isinstance(events, VerbsError) else events:
            self.ready.append(event)
            self.set()

    def read(self) -> str:
        """Return the oldest event, acknowledged."""
        self.reads += 1
        event = self.ready.popleft()
        if isinstance(event, VerbsError):
            raise event
        self.clear()
        return event


class FakeQueue:
    """A fake SharedCompletionQueue that is its own CompletionQueue."""

    def __init__(self) -> None:
        self.is_armed = True
        self.is_arming_scheduled = False
        self.pollers = 0
        self.calls: list[str] = []
        self.arm_fails: VerbsError | None = None
        self.on_arm: Callable[[], None] = lambda: None
        self.waiting: deque[FakeWc] = deque()
        self.fails: VerbsError | None = None
        self.polls_before_failure = 0
        self.polls = 0

    @property
    def cq(self) -> FakeQueue:
        return self

    def arm(self) -> None:
        self.calls.append("arm")
        if self.arm_fails is not None:
            raise self.arm_fails
        self.on_arm()

    def poll(self) -> list[FakeWc]:
        self.calls.append("poll")
        self.polls += 1
        if self.fails is not None and self.polls > self.polls_before_failure:
            raise self.fails
        count = min(len(self.waiting), POLL_BATCH)
        return [self.waiting.popleft() for _ in range(count)]


class FakeReader:
    """A CompletionReader of fake queues. All completions are for Python, none for C code."""

    def __init__(self, loop_device: LoopDevice) -> None:
        self.dispatcher = loop_device.dispatcher
        self._on_pending = loop_device._dispatch_pending
        self._pending: list[FakeWc] = []
        self.keys_to_notify: list[int] = []
        """The keys that the next notified() returns."""
        self.polled_for: list[int] = []
        """The nanoseconds of each poll_for()."""
        self.attached: dict[int, tuple[object, object]] = {}

    def attach(self, key: int, sends: object, receives: object) -> None:
        self.attached[key] = (sends, receives)

    def detach(self, key: int) -> None:
        self.attached.pop(key, None)

    def event(self, channel: FakeCompletionChannel) -> str:
        return channel.read()

    def arm(self, queue: FakeQueue) -> None:
        queue.arm()

    def poll(self, queue: FakeQueue) -> int:
        self._pending = queue.poll()
        count = len(self._pending)
        if self._pending or self.keys_to_notify:
            self._on_pending()
        self._pending = []
        return count

    def poll_for(self, queue: FakeQueue, nanoseconds: int) -> int:
        self.polled_for.append(nanoseconds)
        return self.poll(queue)

    def pending(self) -> list[FakeWc]:
        return self._pending

    def notified(self) -> list[int]:
        keys, self.keys_to_notify = self.keys_to_notify, []
        return keys


class FakeHandler:
    """A CompletionHandler that records its completions and failures."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.failures: list[VerbsError] = []
        self.on_complete: Callable[[], None] = lambda: None

    def complete(self, number: int, wc: FakeWc) -> None:
        self.numbers.append(number)
        self.on_complete()

    def device_failed(self, error: VerbsError) -> None:
        self.failures.append(error)


class Rig:
    """A LoopDevice that reads a fake channel, with two queues and two handlers."""

    def __init__(self) -> None:
        self.loop_device = LoopDevice(running_loop(), FakeDevice())  # type: ignore[arg-type]
        self.reader = FakeReader(self.loop_device)
        self.loop_device._reader = self.reader  # type: ignore[assignment]
        self.channel = FakeCompletionChannel()
        self.loop_device._channel = self.channel  # type: ignore[assignment]
        self.queues = {"a": FakeQueue(), "b": FakeQueue()}
        self.loop_device._queues = self.queues  # type: ignore[assignment]
        self.handlers = [FakeHandler(), FakeHandler()]
        self.keys = [
            self.loop_device.attach(handler)  # type: ignore[arg-type]
            for handler in self.handlers
        ]
        self.loop_device.start_reading()

    def complete(self, queue: str, handler: int, *numbers: int) -> None:
        """Put completions for a handler into a queue."""
        base = self.keys[handler] << KEY_SHIFT
        self.queues[queue].waiting.extend(FakeWc(base | number) for number in numbers)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.loop_device._stop_reading()
    os.close(made.channel.fd)


async def test_completions_are_dispatched_to_their_handlers(rig: Rig) -> None:
    rig.complete("a", 0, 0, 1, 2**32 - 1)
    rig.complete("a", 1, 7)
    rig.complete("b", 0, 5)
    rig.channel.put(["a", "b"])
    await eventually(lambda: rig.channel.reads == 2)
    assert [handler.numbers for handler in rig.handlers] == [[0, 1, 2**32 - 1, 5], [7]]


async def test_completions_of_a_detached_handler_are_dropped(rig: Rig) -> None:
    rig.complete("a", 0, 1)
    rig.complete("a", 1, 2)
    rig.loop_device.detach(rig.keys[0])
    rig.channel.put(["unknown", "a"])
    await eventually(lambda: rig.channel.reads == 2)
    assert [handler.numbers for handler in rig.handlers] == [[], [2]]


async def test_many_completions_do_not_block_the_loop(rig: Rig) -> None:
    count = POLL_BATCH * loop_device.MAX_BATCHES * 3 + 5
    rig.complete("a", 0, *range(count))
    rig.channel.put(["a"])
    seen = set[int]()
    async with asyncio.timeout(TIME_LIMIT):
        while len(rig.handlers[0].numbers) < count:
            seen.add(len(rig.handlers[0].numbers))
            await asyncio.sleep(0)
    assert len(seen) >= 3
    assert rig.handlers[0].numbers == list(range(count))


BROKEN = VerbsError(errno.EIO, "ibv_poll_cq")


async def test_a_queue_that_cannot_be_polled_fails_the_device(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.queues["a"].fails = BROKEN
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]
    assert "fake0: " in caplog.text
    assert "ibv_poll_cq" in caplog.text


async def test_a_channel_that_cannot_be_read_fails_the_device(rig: Rig) -> None:
    error = VerbsError(errno.EIO, "ibv_get_cq_event")
    rig.channel.put(error)
    await eventually(lambda: rig.channel.reads == 1)
    assert [handler.failures for handler in rig.handlers] == [[error], [error]]
    assert [queue.polls for queue in rig.queues.values()] == [0, 0]


@pytest.fixture(params=["poll", "read"])
def failure(request: pytest.FixtureRequest, rig: Rig) -> list[str] | VerbsError:
    rig.queues["a"].fails = BROKEN
    return ["a"] if request.param == "poll" else BROKEN


async def test_a_failed_device_is_not_read_again(rig: Rig, failure: list[str] | VerbsError) -> None:
    rig.channel.put(failure)
    rig.channel.set()
    await eventually(lambda: rig.channel.reads == 1)
    await asyncio.sleep(0.01)
    assert rig.channel.reads == 1
    assert not rig.channel.stop_watching()


async def test_a_handler_can_detach_in_device_failed(
    rig: Rig, failure: list[str] | VerbsError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rig.handlers[0], "device_failed", lambda error: rig.loop_device.detach(rig.keys[0])
    )
    rig.channel.put(failure)
    await eventually(lambda: rig.channel.reads == 1)
    assert rig.handlers[1].failures == [BROKEN]


async def test_after_a_queue_failed_the_next_queues_are_not_polled(rig: Rig) -> None:
    rig.queues["a"].fails = rig.queues["b"].fails = BROKEN
    rig.channel.put(["a", "b"])
    await eventually(lambda: rig.channel.reads == 1)
    await settle()
    assert [queue.polls for queue in rig.queues.values()] == [1, 0]
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]


async def test_a_queue_that_fails_between_two_iterations_fails_the_device(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES * 2))
    rig.queues["a"].fails = BROKEN
    rig.queues["a"].polls_before_failure = loop_device.MAX_BATCHES
    rig.channel.put(["a"])
    await eventually(lambda: rig.handlers[0].failures == [BROKEN])
    await settle()
    assert len(rig.handlers[0].numbers) == POLL_BATCH * loop_device.MAX_BATCHES
    assert rig.queues["a"].polls == loop_device.MAX_BATCHES + 1
    assert not rig.channel.stop_watching()


async def test_two_queues_that_fail_call_device_failed_once(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES * 2))
    rig.queues["a"].polls_before_failure = loop_device.MAX_BATCHES
    rig.queues["a"].fails = rig.queues["b"].fails = BROKEN
    for queue in rig.queues.values():
        rig.loop_device.drain(queue)  # type: ignore[arg-type]
    await settle()
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]
    polls = [queue.polls for queue in rig.queues.values()]
    assert polls == [loop_device.MAX_BATCHES, 1]
    assert not rig.channel.stop_watching()


async def test_drain_calls_then_when_the_queue_is_empty(rig: Rig) -> None:
    rig.complete("a", 0, 1, 2)
    seen: list[list[int]] = []
    queue: Any = rig.queues["a"]
    rig.loop_device.drain(queue, lambda: seen.append(list(rig.handlers[0].numbers)))
    assert seen == [[1, 2]]


async def test_drain_of_many_completions_calls_then_after_the_last_one(rig: Rig) -> None:
    count = POLL_BATCH * loop_device.MAX_BATCHES * 2 + 5
    rig.complete("a", 0, *range(count))
    seen: list[int] = []
    queue: Any = rig.queues["a"]
    rig.loop_device.drain(queue, lambda: seen.append(len(rig.handlers[0].numbers)))
    assert seen == []
    await eventually(lambda: bool(seen))
    await settle()
    assert seen == [count]


async def test_unreserve_frees_the_entries_when_the_queue_is_empty(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES + 5))
    rig.loop_device.detach(rig.keys[0])
    queue: Any = rig.queues["a"]
    queue.free = 100
    rig.loop_device.unreserve(queue, 28)
    assert queue.free == 100
    assert queue.waiting
    await eventually(lambda: queue.free == 128)
    assert not queue.waiting
    rig.loop_device.unreserve(queue, 10)
    await settle()
    assert queue.free == 138


async def test_unreserve_on_a_closed_loop_frees_the_entries_without_polling(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that handles a completion would start a timer, which needs an open loop."""
    rig.complete("a", 0, 1)
    monkeypatch.setattr(rig.loop_device, "_loop", Mock(is_closed=Mock(return_value=True)))
    queue: Any = rig.queues["a"]
    queue.free = 100
    rig.loop_device.unreserve(queue, 28)
    assert queue.free == 128
    assert rig.handlers[0].numbers == []


async def test_unreserve_on_a_failed_queue_frees_the_entries(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.free, queue.fails = 100, BROKEN
    rig.loop_device.unreserve(queue, 28)
    rig.loop_device.unreserve(queue, 28)
    await settle()
    assert queue.free == 156
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]


async def test_a_handler_that_raises_on_the_failure_does_not_stop_the_others(
    rig: Rig,
    failure: list[str] | VerbsError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rig.handlers[0], "device_failed", lambda error: 1 // 0)
    rig.channel.put(failure)
    await eventually(lambda: rig.channel.reads == 1)
    assert rig.handlers[1].failures == [BROKEN]
    assert "could not handle the failure of fake0" in caplog.text


# --- events and polling tasks ---


async def test_one_event_is_read_in_each_iteration(rig: Rig) -> None:
    seen: list[int] = []

    async def watch() -> None:
        while rig.channel.reads < 4:
            seen.append(rig.channel.reads)
            await asyncio.sleep(0)

    rig.channel.put(["a", "b", "a", "b"])
    await asyncio.wait_for(watch(), TIME_LIMIT)
    assert {1, 2, 3} <= set(seen)
    assert rig.channel.stop_watching()  # it is still read


async def test_a_queue_is_armed_before_its_last_poll(rig: Rig) -> None:
    queue = rig.queues["a"]
    queue.on_arm = lambda: rig.complete("a", 0, 3)  # too early to raise an event
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll", "arm", "poll"]
    assert queue.is_armed
    assert rig.handlers[0].numbers == [3]


async def test_a_task_woken_by_a_completion_runs_before_the_queue_is_armed(rig: Rig) -> None:
    queue, future = rig.queues["a"], make_future(asyncio.get_running_loop())
    seen: list[str] = []

    async def wait() -> None:
        await future
        seen.extend(queue.calls)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    rig.handlers[0].on_complete = lambda: future.set_result(None)
    rig.complete("a", 0, 3)
    rig.channel.put(["a"])
    await asyncio.wait_for(waiting, TIME_LIMIT)
    assert seen == ["poll"]


async def test_a_queue_is_not_armed_if_a_handler_stops_the_reading(rig: Rig) -> None:
    queue = rig.queues["a"]
    rig.handlers[0].on_complete = rig.loop_device._stop_reading
    rig.complete("a", 0, 3)
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll"]


async def test_a_queue_that_cannot_be_armed_fails_the_device(rig: Rig) -> None:
    rig.queues["a"].arm_fails = BROKEN
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]
    assert rig.queues["a"].polls == 1
    assert not rig.channel.stop_watching()


async def test_a_queue_is_not_armed_while_a_task_polls(rig: Rig) -> None:
    queue = rig.queues["a"]
    queue.pollers = 1
    rig.complete("a", 0, 1)
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll"]
    assert not queue.is_armed
    assert rig.handlers[0].numbers == [1]


async def test_a_queue_is_armed_and_polled_after_the_last_task_stops_polling(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers, queue.is_armed = 2, False
    rig.complete("a", 0, 1)
    rig.loop_device.stop_polling(queue)
    await settle()
    assert (queue.pollers, queue.calls) == (1, [])
    rig.loop_device.stop_polling(queue)
    assert queue.calls == []  # only in the next iteration: the task might poll again
    await settle()
    assert queue.calls == ["arm", "poll"]
    assert (queue.is_armed, queue.is_arming_scheduled) == (True, False)
    assert rig.handlers[0].numbers == [1]


async def test_a_queue_is_not_armed_if_a_task_polls_again_at_once(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.is_armed = False
    for _ in range(3):
        queue.pollers += 1
        rig.loop_device.stop_polling(queue)
    queue.pollers += 1
    await settle()
    assert (queue.calls, queue.is_arming_scheduled) == ([], False)
    rig.loop_device.stop_polling(queue)
    queue.pollers += 1
    rig.loop_device.stop_polling(queue)
    await settle()
    assert queue.calls == ["arm", "poll"]  # once


async def test_stop_polling_schedules_the_arming_without_a_system_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """call_soon_threadsafe() would write to a socket and read it."""
    loop = asyncio.get_running_loop()
    queue: Any = rig.queues["a"]
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: pytest.fail("through a socket"))
    queue.pollers, queue.is_armed = 1, False
    rig.loop_device.stop_polling(queue)
    await settle()
    assert queue.is_armed


async def test_stop_polling_works_on_a_closed_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers, queue.is_armed = 1, False
    closed = asyncio.new_event_loop()
    closed.close()
    monkeypatch.setattr(rig.loop_device, "_loop", closed)
    rig.loop_device.stop_polling(queue)
    assert queue.pollers == 0


async def test_stop_polling_does_not_arm_an_armed_queue(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers = 1
    rig.loop_device.stop_polling(queue)
    await settle()
    assert queue.calls == []


async def test_a_queue_is_not_armed_after_the_reading_has_stopped(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers, queue.is_armed = 1, False
    rig.loop_device.stop_polling(queue)
    rig.loop_device._stop_reading()
    await settle()
    assert queue.calls == []


async def test_poll_for_dispatches_completions_to_their_handlers(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    rig.complete("a", 1, 4)
    rig.loop_device.poll_for(queue, 1000)
    assert rig.handlers[1].numbers == [4]
    assert rig.reader.polled_for == [1000]


async def test_poll_for_on_a_broken_queue_fails_the_device(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.fails = BROKEN
    rig.loop_device.poll_for(queue, 1000)
    rig.loop_device.poll_for(queue, 1000)
    assert [handler.failures for handler in rig.handlers] == [[BROKEN], [BROKEN]]
    assert rig.reader.polled_for == [1000]
    assert not rig.channel.stop_watching()


# --- the fast path ---


async def test_keys_with_pending_work_are_notified(rig: Rig) -> None:
    notified: list[int] = []
    sends: Any = object()
    receives: Any = object()
    for index, key in enumerate(rig.keys):
        rig.loop_device.attach_fast_path(key, sends, receives, partial(notified.append, index))
    assert rig.reader.attached == dict.fromkeys(rig.keys, (sends, receives))
    rig.reader.keys_to_notify = [rig.keys[1], 12345, rig.keys[0]]
    rig.complete("a", 0, 8)
    queue: Any = rig.queues["a"]
    rig.loop_device.drain(queue)
    assert (notified, rig.handlers[0].numbers) == ([1, 0], [8])
    rig.reader.keys_to_notify = [rig.keys[1]]
    rig.loop_device.detach(rig.keys[1])
    rig.loop_device.drain(queue)
    assert notified == [1, 0]
    assert list(rig.reader.attached) == [rig.keys[0]]
