"""CmDispatcher and LoopDevice: what is read goes to its owner, and what fails ends all waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import pytest_asyncio
from cm_fakes import PEER, FakeCmId

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
    for _ in range(5):
        await asyncio.sleep(0)


class ReadableFd:
    """A file descriptor that is readable while it is told so."""

    def __init__(self, flags: int = 0) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | flags)
        self._watched_by = asyncio.get_running_loop()

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)

    def stop_watching(self) -> bool:
        """Whether it was watched until now."""
        return self._watched_by.remove_reader(self.fd)


class FakeEventChannel(ReadableFd):
    """rdma_cm events that were put there; an exception among them is raised in its turn."""

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
            raise batch  # stays readable, as the fd of a removed device does
        self.clear()
        return batch

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        self.closed = True


class FakeOwnChannel(FakeEventChannel):
    """The channel of a listening id."""

    made: ClassVar[list[FakeOwnChannel]] = []

    def __init__(self) -> None:
        super().__init__()
        self.holders = 1
        self.lock = threading.Lock()
        self.made.append(self)

    def acquire(self) -> FakeOwnChannel:
        assert not self.closed
        with self.lock:
            self.holders += 1
        return self

    def release(self) -> None:
        """In any thread: the one that destroys the id of a request may be the last."""
        with self.lock:
            self.holders -= 1
            if self.holders:
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
    FakeOwnChannel.made.clear()
    with made.dispatcher.referenced():
        yield made
        for cm_id in made.ids:
            await cm_id.aclose()
        assert not made.channel.closed
    assert made.channel.closed
    await eventually(lambda: all(channel.closed for channel in FakeOwnChannel.made))
    assert running_loop() not in cm_events._dispatchers


def settle_in_thread(channel: FakeEventChannel) -> None:
    """In the thread that destroys the listener: until the loop has read what came before."""
    deadline = time.monotonic() + TIME_LIMIT
    while channel.batches and time.monotonic() < deadline:
        time.sleep(0.001)


# --- events of ids ---


async def test_an_event_goes_to_its_id(cm: Cm) -> None:
    (first, task), (second, other) = await cm.resolving(), await cm.resolving()
    cm.channel.put([cm.event(E.ADDR_ERROR, second), cm.event(E.ADDR_RESOLVED, first)])
    await task
    with pytest.raises(RdmaError, match="no RDMA path"):
        await other
    assert (first.state, second.state) == (S.ADDR_RESOLVED, S.ADDR_BOUND)


async def test_an_event_of_an_id_that_is_gone_is_dropped(cm: Cm) -> None:
    gone, (cm_id, task) = await cm.make_id(), await cm.resolving()
    await gone.aclose()
    cm.channel.put([cm.event(E.ADDR_RESOLVED, gone), cm.event(E.ADDR_RESOLVED, cm_id)])
    await task


async def test_an_event_that_cannot_be_handled_does_not_stop_those_behind_it(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
    broken, (cm_id, task) = await cm.make_id(), await cm.resolving()
    broken.on_change = lambda: 1 // 0  # type: ignore[assignment]
    cm.channel.put([cm.event(E.ADDR_CHANGE, broken), cm.event(E.ADDR_RESOLVED, cm_id)])
    await task
    broken.on_change = None
    assert "could not handle ADDR_CHANGE" in caplog.text


async def test_a_request_for_a_listener_that_is_gone_is_refused(cm: Cm) -> None:
    """It came just before; its id is destroyed before its channel is closed."""
    listener = await cm.make_id()
    listener.listen()
    [channel] = FakeOwnChannel.made
    child, closed_first = cm.create(), list[bool]()
    child.during["destroy"] = lambda: closed_first.append(channel.closed)
    channel.put([cm.request(listener, child)])
    cm.raw[listener.cm_id.address].during["destroy"] = lambda: settle_in_thread(channel)
    await listener.aclose()
    await eventually(child.destroyed.is_set)
    assert closed_first == [False]
    await eventually(lambda: channel.closed)


async def test_a_listener_is_told_by_its_own_channel(cm: Cm) -> None:
    listener, other = await cm.make_id(), await cm.make_id()
    listener.listen()
    [channel] = FakeOwnChannel.made
    child = cm.create()
    channel.put([cm.request(listener, child), cm.event(E.DEVICE_REMOVAL, listener)])
    await eventually(lambda: listener.state is S.REMOVED)
    assert other.state is S.IDLE
    async with await listener.get_request() as request:
        assert request.cm_id is child
        assert child.calls == ["migrate"]


async def test_a_listeners_channel_that_fails_ends_that_listener(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = await cm.make_id(), await cm.make_id()
    listener.listen()
    task = asyncio.create_task(listener.get_request())
    await settle()
    [channel] = FakeOwnChannel.made
    channel.put(GONE)
    with pytest.raises(DeviceRemoved, match=os.strerror(errno.EIO)):
        await asyncio.wait_for(task, TIME_LIMIT)
    assert not channel.stop_watching()
    assert other.state is S.IDLE
    assert "channel of a listener failed" in caplog.text


async def test_a_listener_whose_channel_cannot_be_opened_stays_as_it_was(
    cm: Cm, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = await cm.make_id()
    with monkeypatch.context() as patch:
        patch.setattr("aiordma.cm.handle.OwnChannel", none_left)
        with pytest.raises(VerbsError) as caught:
            listener.listen()
    assert caught.value.errno == errno.EMFILE
    assert listener.state is S.IDLE
    listener.listen()


def none_left() -> object:
    raise VerbsError(errno.EMFILE, "rdma_create_event_channel")


# --- a channel that fails ---


GONE = VerbsError(errno.EIO, "rdma_get_cm_event")


async def test_a_channel_that_fails_ends_what_waits(
    cm: Cm, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_a_channel_that_fails_ends_listening(cm: Cm) -> None:
    ids = [await cm.make_id(), await cm.make_id()]
    for cm_id in ids:
        cm_id.listen()
    listener = Listener(ids, ConnectionOptions())
    task = asyncio.create_task(listener.get_request())
    await settle()
    cm.channel.put(GONE)
    with pytest.raises(DeviceRemoved):
        await asyncio.wait_for(task, TIME_LIMIT)


async def test_a_channel_that_fails_is_read_no_more(cm: Cm) -> None:
    await cm.make_id()
    cm.channel.put(GONE)
    await eventually(lambda: cm.channel.reads == 1)
    await asyncio.sleep(0.01)
    assert cm.channel.reads == 1
    assert not cm.channel.stop_watching()


async def test_ids_are_closed_as_ever_after_their_channel_failed(cm: Cm) -> None:
    closed, (cm_id, task) = await cm.make_id(), await cm.resolving()
    await closed.aclose()
    cm.channel.put(GONE)
    with pytest.raises(DeviceRemoved):
        await task
    assert closed.state is S.CLOSED
    await cm_id.aclose()
    with pytest.raises(LocalClosed):
        await cm_id.resolve_addr(PEER)


async def test_an_id_that_cannot_take_the_failure_does_not_stop_the_others(
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


async def test_an_id_made_after_the_channel_failed_is_on_a_new_one(cm: Cm) -> None:
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
    """Completion events that were put there, each of a queue that is to be armed and polled."""

    def __init__(self) -> None:
        super().__init__(os.EFD_SEMAPHORE)
        self.ready: deque[str | VerbsError] = deque()
        self.reads = 0

    def put(self, events: list[str] | VerbsError) -> None:
        for event in [events] if isinstance(events, VerbsError) else events:
            self.ready.append(event)
            self.set()

    def read(self) -> str:
        """The oldest event, acknowledged."""
        self.reads += 1
        event = self.ready.popleft()
        if isinstance(event, VerbsError):
            raise event
        self.clear()
        return event


class FakeQueue:
    """A SharedQueue and its CompletionQueue in one."""

    def __init__(self) -> None:
        self.is_armed = True
        self.is_arming_scheduled = False
        self.pollers = 0
        self.calls: list[str] = []
        self.arm_fails: VerbsError | None = None
        self.on_arm: Callable[[], None] = lambda: None
        self.waiting: deque[FakeWc] = deque()
        self.fails: VerbsError | None = None
        self.good_polls = 0
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
        if self.fails is not None and self.polls > self.good_polls:
            raise self.fails
        count = min(len(self.waiting), POLL_BATCH)
        return [self.waiting.popleft() for _ in range(count)]


class FakeReader:
    """A CompletionReader of fake queues. Nothing is done with in C: all is left for Python."""

    def __init__(self, shared: LoopDevice) -> None:
        self.dispatcher = shared.dispatcher
        self._on_pending = shared._dispatch_pending
        self._left: list[FakeWc] = []
        self.to_tell: list[int] = []
        """Keys of those who are to look when a batch has been taken."""
        self.spins: list[int] = []
        self.attached: dict[int, tuple[object, object]] = {}

    def attach(self, key: int, sends: object, arrivals: object) -> None:
        self.attached[key] = (sends, arrivals)

    def detach(self, key: int) -> None:
        self.attached.pop(key, None)

    def event(self, channel: FakeCompletionChannel) -> str:
        return channel.read()

    def arm(self, queue: FakeQueue) -> None:
        queue.arm()

    def poll(self, queue: FakeQueue) -> int:
        self._left = queue.poll()
        count = len(self._left)
        if self._left or self.to_tell:
            self._on_pending()
        self._left = []
        return count

    def poll_for(self, queue: FakeQueue, nanoseconds: int) -> int:
        self.spins.append(nanoseconds)
        return self.poll(queue)

    def pending(self) -> list[FakeWc]:
        return self._left

    def notified(self) -> list[int]:
        keys, self.to_tell = self.to_tell, []
        return keys


class Sink:
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
    """A LoopDevice that reads a fake channel, with two queues behind it and two sinks."""

    def __init__(self) -> None:
        self.shared = LoopDevice(running_loop(), FakeDevice())  # type: ignore[arg-type]
        self.reader = FakeReader(self.shared)
        self.shared._reader = self.reader  # type: ignore[assignment]
        self.channel = FakeCompletionChannel()
        self.shared._channel = self.channel  # type: ignore[assignment]
        self.queues = {"a": FakeQueue(), "b": FakeQueue()}
        self.shared._queues = self.queues  # type: ignore[assignment]
        self.sinks = [Sink(), Sink()]
        self.keys = [self.shared.attach(sink) for sink in self.sinks]  # type: ignore[arg-type]
        self.shared.start_reading()

    def complete(self, queue: str, sink: int, *numbers: int) -> None:
        base = self.keys[sink] << KEY_SHIFT
        self.queues[queue].waiting.extend(FakeWc(base | number) for number in numbers)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.shared._stop_reading()
    os.close(made.channel.fd)


async def test_completions_go_to_their_owners(rig: Rig) -> None:
    rig.complete("a", 0, 0, 1, 2**32 - 1)
    rig.complete("a", 1, 7)
    rig.complete("b", 0, 5)
    rig.channel.put(["a", "b"])
    await eventually(lambda: rig.channel.reads == 2)
    assert [sink.numbers for sink in rig.sinks] == [[0, 1, 2**32 - 1, 5], [7]]


async def test_completions_of_an_owner_that_is_gone_are_dropped(rig: Rig) -> None:
    rig.complete("a", 0, 1)
    rig.complete("a", 1, 2)
    rig.shared.detach(rig.keys[0])
    rig.channel.put(["unheard of", "a"])
    await eventually(lambda: rig.channel.reads == 2)
    assert [sink.numbers for sink in rig.sinks] == [[], [2]]


async def test_a_flood_of_completions_gives_the_loop_its_turns(rig: Rig) -> None:
    count = POLL_BATCH * loop_device.MAX_BATCHES * 3 + 5
    rig.complete("a", 0, *range(count))
    rig.channel.put(["a"])
    seen = set[int]()
    async with asyncio.timeout(TIME_LIMIT):
        while len(rig.sinks[0].numbers) < count:
            seen.add(len(rig.sinks[0].numbers))
            await asyncio.sleep(0)
    assert len(seen) >= 3
    assert rig.sinks[0].numbers == list(range(count))


BROKEN = VerbsError(errno.EIO, "ibv_poll_cq")


async def test_a_queue_that_cannot_be_polled_fails_the_device(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.queues["a"].fails = BROKEN
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]
    assert "fake0: " in caplog.text
    assert "ibv_poll_cq" in caplog.text


async def test_a_channel_that_cannot_be_read_fails_the_device(rig: Rig) -> None:
    error = VerbsError(errno.EIO, "ibv_get_cq_event")
    rig.channel.put(error)
    await eventually(lambda: rig.channel.reads == 1)
    assert [sink.failures for sink in rig.sinks] == [[error], [error]]
    assert [queue.polls for queue in rig.queues.values()] == [0, 0]


@pytest.fixture(params=["poll", "read"])
def failure(request: pytest.FixtureRequest, rig: Rig) -> list[str] | VerbsError:
    rig.queues["a"].fails = BROKEN
    return ["a"] if request.param == "poll" else BROKEN


async def test_a_device_that_failed_is_read_no_more(
    rig: Rig, failure: list[str] | VerbsError
) -> None:
    rig.channel.put(failure)
    rig.channel.set()
    await eventually(lambda: rig.channel.reads == 1)
    await asyncio.sleep(0.01)
    assert rig.channel.reads == 1
    assert not rig.channel.stop_watching()


async def test_a_sink_may_go_as_it_hears_of_the_failure(
    rig: Rig, failure: list[str] | VerbsError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.sinks[0], "device_failed", lambda error: rig.shared.detach(rig.keys[0]))
    rig.channel.put(failure)
    await eventually(lambda: rig.channel.reads == 1)
    assert rig.sinks[1].failures == [BROKEN]


async def test_queues_behind_one_that_failed_are_not_polled(rig: Rig) -> None:
    rig.queues["a"].fails = rig.queues["b"].fails = BROKEN
    rig.channel.put(["a", "b"])
    await eventually(lambda: rig.channel.reads == 1)
    await settle()
    assert [queue.polls for queue in rig.queues.values()] == [1, 0]
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]


async def test_a_queue_that_breaks_between_two_turns_fails_the_device_too(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES * 2))
    rig.queues["a"].fails = BROKEN
    rig.queues["a"].good_polls = loop_device.MAX_BATCHES
    rig.channel.put(["a"])
    await eventually(lambda: rig.sinks[0].failures == [BROKEN])
    await settle()
    assert len(rig.sinks[0].numbers) == POLL_BATCH * loop_device.MAX_BATCHES
    assert rig.queues["a"].polls == loop_device.MAX_BATCHES + 1
    assert not rig.channel.stop_watching()


async def test_a_failure_is_told_once_though_a_queue_was_to_be_polled_again(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES * 2))
    rig.queues["a"].good_polls = loop_device.MAX_BATCHES
    rig.queues["a"].fails = rig.queues["b"].fails = BROKEN
    for queue in rig.queues.values():
        rig.shared.drain(queue)  # type: ignore[arg-type]
    await settle()
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]
    polls = [queue.polls for queue in rig.queues.values()]
    assert polls == [loop_device.MAX_BATCHES, 1]
    assert not rig.channel.stop_watching()


async def test_draining_ends_when_the_queue_is_empty(rig: Rig) -> None:
    rig.complete("a", 0, 1, 2)
    seen: list[list[int]] = []
    queue: Any = rig.queues["a"]
    rig.shared.drain(queue, lambda: seen.append(list(rig.sinks[0].numbers)))
    assert seen == [[1, 2]]


async def test_draining_a_flood_ends_after_the_last_one(rig: Rig) -> None:
    count = POLL_BATCH * loop_device.MAX_BATCHES * 2 + 5
    rig.complete("a", 0, *range(count))
    seen: list[int] = []
    queue: Any = rig.queues["a"]
    rig.shared.drain(queue, lambda: seen.append(len(rig.sinks[0].numbers)))
    assert seen == []
    await eventually(lambda: bool(seen))
    await settle()
    assert seen == [count]


async def test_a_promise_is_taken_back_when_the_queue_is_empty(rig: Rig) -> None:
    rig.complete("a", 0, *range(POLL_BATCH * loop_device.MAX_BATCHES + 5))
    rig.shared.detach(rig.keys[0])
    queue: Any = rig.queues["a"]
    queue.free = 100
    rig.shared.unreserve(queue, 28)
    assert queue.free == 100
    assert queue.waiting
    await eventually(lambda: queue.free == 128)
    assert not queue.waiting
    rig.shared.unreserve(queue, 10)
    await settle()
    assert queue.free == 138


async def test_on_a_closed_loop_a_promise_is_taken_back_and_nobody_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that hears of its end would start a timer: no loop is there for that."""
    rig.complete("a", 0, 1)
    monkeypatch.setattr(rig.shared, "_loop", Mock(is_closed=Mock(return_value=True)))
    queue: Any = rig.queues["a"]
    queue.free = 100
    rig.shared.unreserve(queue, 28)
    assert queue.free == 128
    assert rig.sinks[0].numbers == []


async def test_a_queue_that_fails_is_polled_once_and_its_promises_are_taken_back(
    rig: Rig,
) -> None:
    queue: Any = rig.queues["a"]
    queue.free, queue.fails = 100, BROKEN
    rig.shared.unreserve(queue, 28)
    rig.shared.unreserve(queue, 28)
    await settle()
    assert queue.free == 156
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]


async def test_a_sink_that_cannot_take_the_failure_does_not_stop_the_others(
    rig: Rig,
    failure: list[str] | VerbsError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rig.sinks[0], "device_failed", lambda error: 1 // 0)
    rig.channel.put(failure)
    await eventually(lambda: rig.channel.reads == 1)
    assert rig.sinks[1].failures == [BROKEN]
    assert "could not handle the failure of fake0" in caplog.text


# --- events, and who polls ---


async def test_one_event_is_read_a_turn(rig: Rig) -> None:
    seen: list[int] = []

    async def watch() -> None:
        while rig.channel.reads < 4:
            seen.append(rig.channel.reads)
            await asyncio.sleep(0)

    rig.channel.put(["a", "b", "a", "b"])
    await asyncio.wait_for(watch(), TIME_LIMIT)
    assert {1, 2, 3} <= set(seen)
    assert rig.channel.stop_watching()  # it is still read


async def test_a_queue_is_armed_before_it_is_polled_for_the_last_time(rig: Rig) -> None:
    queue = rig.queues["a"]
    queue.on_arm = lambda: rig.complete("a", 0, 3)  # just before, and without an event
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll", "arm", "poll"]
    assert queue.is_armed
    assert rig.sinks[0].numbers == [3]


async def test_whom_a_completion_is_for_goes_on_before_the_queue_is_armed(rig: Rig) -> None:
    queue, future = rig.queues["a"], make_future(asyncio.get_running_loop())
    seen: list[str] = []

    async def wait() -> None:
        await future
        seen.extend(queue.calls)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    rig.sinks[0].on_complete = lambda: future.set_result(None)
    rig.complete("a", 0, 3)
    rig.channel.put(["a"])
    await asyncio.wait_for(waiting, TIME_LIMIT)
    assert seen == ["poll"]


async def test_a_device_that_is_let_go_by_whom_a_completion_is_for_is_not_armed(rig: Rig) -> None:
    queue = rig.queues["a"]
    rig.sinks[0].on_complete = rig.shared._stop_reading
    rig.complete("a", 0, 3)
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll"]


async def test_a_queue_that_cannot_be_armed_fails_the_device(rig: Rig) -> None:
    rig.queues["a"].arm_fails = BROKEN
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]
    assert rig.queues["a"].polls == 1
    assert not rig.channel.stop_watching()


async def test_while_a_task_polls_the_queue_is_not_armed(rig: Rig) -> None:
    queue = rig.queues["a"]
    queue.pollers = 1
    rig.complete("a", 0, 1)
    rig.channel.put(["a"])
    await eventually(lambda: rig.channel.reads == 1)
    assert queue.calls == ["poll"]
    assert not queue.is_armed
    assert rig.sinks[0].numbers == [1]


async def test_when_the_last_polls_no_more_the_queue_is_armed_and_polled(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers, queue.is_armed = 2, False
    rig.complete("a", 0, 1)
    rig.shared.stop_polling(queue)
    await settle()
    assert (queue.pollers, queue.calls) == (1, [])
    rig.shared.stop_polling(queue)
    assert queue.calls == []  # not before the loop has its turn: it may poll again
    await settle()
    assert queue.calls == ["arm", "poll"]
    assert (queue.is_armed, queue.is_arming_scheduled) == (True, False)
    assert rig.sinks[0].numbers == [1]


async def test_who_polls_again_at_once_has_the_queue_not_armed(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.is_armed = False
    for _ in range(3):
        queue.pollers += 1
        rig.shared.stop_polling(queue)
    queue.pollers += 1
    await settle()
    assert (queue.calls, queue.is_arming_scheduled) == ([], False)
    rig.shared.stop_polling(queue)
    queue.pollers += 1
    rig.shared.stop_polling(queue)
    await settle()
    assert queue.calls == ["arm", "poll"]  # once


async def test_arming_later_takes_no_system_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As call_soon_threadsafe() would: writing to a socket, and reading it."""
    loop, queue = asyncio.get_running_loop(), rig.queues["a"]
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: pytest.fail("through a socket"))
    queue.pollers, queue.is_armed = 1, False
    rig.shared.stop_polling(queue)
    await settle()
    assert queue.is_armed


async def test_polling_may_end_with_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = rig.queues["a"]
    queue.pollers, queue.is_armed = 1, False
    closed = asyncio.new_event_loop()
    closed.close()
    monkeypatch.setattr(rig.shared, "_loop", closed)
    rig.shared.stop_polling(queue)
    assert queue.pollers == 0


async def test_a_queue_that_is_armed_is_left_so(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers = 1
    rig.shared.stop_polling(queue)
    await settle()
    assert queue.calls == []


async def test_a_queue_is_not_armed_when_nobody_reads_any_more(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.pollers, queue.is_armed = 1, False
    rig.shared.stop_polling(queue)
    rig.shared._stop_reading()
    await settle()
    assert queue.calls == []


async def test_spinning_takes_completions_to_their_owners(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    rig.complete("a", 1, 4)
    rig.shared.poll_for(queue, 1000)
    assert rig.sinks[1].numbers == [4]
    assert rig.reader.spins == [1000]


async def test_a_queue_that_fails_under_who_polls_fails_the_device(rig: Rig) -> None:
    queue: Any = rig.queues["a"]
    queue.fails = BROKEN
    rig.shared.poll_for(queue, 1000)
    rig.shared.poll_for(queue, 1000)
    assert [sink.failures for sink in rig.sinks] == [[BROKEN], [BROKEN]]
    assert rig.reader.spins == [1000]
    assert not rig.channel.stop_watching()


# --- what is done in C ---


async def test_who_has_something_to_look_at_is_told(rig: Rig) -> None:
    looks: list[int] = []
    sends: Any = object()
    arrivals: Any = object()
    for sink, key in enumerate(rig.keys):
        rig.shared.attach_fast_path(key, sends, arrivals, lambda sink=sink: looks.append(sink))
    assert rig.reader.attached == dict.fromkeys(rig.keys, (sends, arrivals))
    rig.reader.to_tell = [rig.keys[1], 12345, rig.keys[0]]
    rig.complete("a", 0, 8)
    queue: Any = rig.queues["a"]
    rig.shared.drain(queue)
    assert (looks, rig.sinks[0].numbers) == ([1, 0], [8])
    rig.reader.to_tell = [rig.keys[1]]
    rig.shared.detach(rig.keys[1])
    rig.shared.drain(queue)
    assert looks == [1, 0]
    assert list(rig.reader.attached) == [rig.keys[0]]
