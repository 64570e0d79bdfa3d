"""CmDispatcher and LoopDevice: events and completions reach their handlers; failures end waits."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import loops
import pytest
from simulator import Simulation
from simulator.ids import PORT, connect, listening, resolved, target
from simulator.world import ffi, lib

import aiordma
from aiordma import DeviceRemoved, Listener, LocalClosed, RdmaError, Rejected, VerbsError
from aiordma.cm import AsyncCmId, CmState
from aiordma.dispatch import KEY_SHIFT, LoopDevice, loop_device
from aiordma.enums import CmEventType
from aiordma.loop import call_threadsafe, make_future, running_loop
from aiordma.options import ConnectionOptions
from aiordma.rdmacm import parse_address
from aiordma.verbs.completion import POLL_BATCH

E, S = CmEventType, CmState

# --- events of ids ---


async def test_an_event_is_dispatched_to_its_id(simulation: Simulation) -> None:
    closed = await AsyncCmId.create()
    async with await AsyncCmId.create() as first, await AsyncCmId.create() as second:
        simulation.cm.hold(E.ADDR_RESOLVED)
        absent = parse_address("10.9.9.9", PORT)
        tasks = [
            loops.create_task(one.resolve_addr(address))
            for one, address in ((first, target(simulation)), (second, absent))
        ]
        await loops.sleep(1)
        await closed.aclose()
        simulation.cm.put(second, E.ADDR_ERROR)
        simulation.cm.release()
        await tasks[0]
        with pytest.raises(RdmaError, match="no RDMA path"):
            await tasks[1]


@pytest.mark.parametrize("kind", [E.ADDR_CHANGE, E.DEVICE_REMOVAL])
async def test_a_handler_that_raises_does_not_stop_the_others(
    simulation: Simulation, caplog: pytest.LogCaptureFixture, kind: CmEventType
) -> None:
    async with await AsyncCmId.create() as broken, await AsyncCmId.create() as cm_id:
        broken.on_change = lambda: 1 // 0  # type: ignore[assignment]
        task = loops.create_task(cm_id.resolve_addr(target(simulation)))
        await loops.sleep(1e-6)
        if kind is E.ADDR_CHANGE:
            simulation.cm.put(broken, kind)
            await task
        else:
            simulation.cm.fail_channels(simulation.cm.id_of(broken).channel)
            await loops.wait([task])
            assert (broken.state, cm_id.state) == (S.REMOVED, S.REMOVED)
        await loops.sleep(1)
        broken.on_change = None
    assert f"could not handle {kind.name}" in caplog.text


async def test_a_request_for_a_closing_listener_is_rejected(simulation: Simulation) -> None:
    """The id of the request is destroyed before its channel is closed."""
    async with listening(simulation) as listener, await resolved(simulation) as active:
        simulation.world.calls.delay("rdma_destroy_id", before=1)
        listener.abort()
        with pytest.raises(Rejected):
            await connect(active)


async def test_a_failed_channel_of_a_listener_ends_only_that_listener(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(simulation) as listener, await AsyncCmId.create() as other:
        task = loops.create_task(listener.get_request())
        await loops.sleep(1)
        simulation.cm.fail_channels(simulation.cm.id_of(listener).channel)
        with pytest.raises(DeviceRemoved, match=os.strerror(errno.EACCES)):
            await task
        assert other.state is S.IDLE
    assert "channel of a listener failed" in caplog.text


async def test_a_failed_channel_ends_all_waits(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    closed, calls = await AsyncCmId.create(), simulation.world.calls
    await closed.aclose()
    listeners = [await AsyncCmId.create() for _ in range(2)]
    for one in listeners:
        one.listen()
    async with Listener(listeners, ConnectionOptions()) as listener:
        ids = [await AsyncCmId.create() for _ in range(2)]
        simulation.cm.hold(E.ADDR_RESOLVED)
        tasks = [loops.create_task(one.resolve_addr(target(simulation))) for one in ids]
        tasks.append(loops.create_task(listener.get_request()))  # type: ignore[arg-type]
        await loops.sleep(1)
        reads = calls.counts["rdma_get_cm_event"]
        simulation.cm.fail_channels(simulation.cm.id_of(ids[0]).channel)
        for task in tasks:
            with pytest.raises(DeviceRemoved, match=os.strerror(errno.EACCES)):
                await task
        await loops.sleep(1)
        assert calls.counts["rdma_get_cm_event"] == reads + 1  # it is not read again
        simulation.cm.release()
        async with await AsyncCmId.create() as new:  # on a new channel
            await new.resolve_addr(target(simulation))
            for one in ids:
                await one.aclose()
                with pytest.raises(LocalClosed):
                    await one.resolve_addr(target(simulation))
            await new.resolve_route()
    assert "event channel failed, and all its ids with it: " in caplog.text
    assert closed.state is S.CLOSED


# --- completions ---


class Handler:
    """A CompletionHandler that records its completions and failures."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.failures: list[VerbsError] = []
        self.on_complete: Callable[[], object] = lambda: None
        self.on_failure: Callable[[], object] = lambda: None

    def complete(self, number: int, wc: object) -> None:
        self.numbers.append(number)
        self.on_complete()

    def device_failed(self, error: VerbsError) -> None:
        self.failures.append(error)
        self.on_failure()


class Rig:
    """A LoopDevice with two completion queues and two handlers."""

    def __init__(self, simulation: Simulation, device: LoopDevice) -> None:
        self.world = simulation.world
        self.loop_device = device
        entries = 1 << 16
        self.queues = [device.reserve(entries) for _ in range(2)]
        self.raw = [self.world.objects[queue.cq.address].pointer for queue in self.queues]
        self.channel = next(iter(self.world.all(type(self._channel()))))
        self.handlers = [Handler(), Handler()]
        self.keys = [device.attach(handler) for handler in self.handlers]
        device.start_reading()

    def _channel(self) -> Any:
        return self.world.objects[self.loop_device._channel.address]  # type: ignore[union-attr]

    def complete(self, queue: int, handler: int, *numbers: int) -> None:
        """Add completions for a handler to a queue."""
        wc = ffi.new("struct ibv_wc *")
        for number in numbers:
            wc.wr_id = self.keys[handler] << KEY_SHIFT | number
            assert not lib.sim_complete(self.raw[queue], wc, ffi.NULL, 0, False)

    def break_by(self, how: str) -> None:
        """Make the next completion of the first queue fail the device."""
        if how == "poll":
            self.raw[0].poll_failure = -errno.EIO
        elif how == "arm":
            self.raw[0].arm_failure = errno.EIO
        else:
            self.channel.pointer.failure = errno.EIO
        self.complete(0, 0, 1)

    @property
    def failures(self) -> list[list[int | None]]:
        return [[error.errno for error in one.failures] for one in self.handlers]


@asynccontextmanager
async def rig_of(simulation: Simulation) -> AsyncIterator[Rig]:
    async with await resolved(simulation) as cm_id:
        device = LoopDevice.of(running_loop(), cm_id.device())
        rig = Rig(simulation, device)
        yield rig
        for handler, key in zip(rig.handlers, rig.keys, strict=True):
            handler.on_complete = lambda: None
            device.detach(key)
        device.release()
        await loops.sleep(1)


async def test_completions_are_dispatched_to_their_handlers(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        rig.complete(0, 0, 0, 1, 2**32 - 1)
        rig.complete(0, 1, 7)
        rig.complete(1, 0, 5)
        await loops.sleep(1)
        assert [handler.numbers for handler in rig.handlers] == [[0, 1, 2**32 - 1, 5], [7]]
        rig.loop_device.detach(rig.keys[0])
        rig.complete(0, 0, 1)
        rig.complete(0, 1, 2)
        await loops.sleep(1)
        assert rig.handlers[1].numbers == [7, 2]
        rig.loop_device.poll_for(rig.queues[0], 1000)
        rig.complete(1, 1, 3)
        rig.loop_device.poll_for(rig.queues[1], 1000)
        assert rig.handlers[1].numbers == [7, 2, 3]


MANY = POLL_BATCH * loop_device.MAX_BATCHES * 3 + 5


async def test_many_completions_do_not_block_the_loop(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        seen: set[int] = set()
        rig.complete(0, 0, *range(MANY))
        while len(rig.handlers[0].numbers) < MANY:
            seen.add(len(rig.handlers[0].numbers))
            await loops.sleep(0)
        assert len(seen) >= 2
        assert rig.handlers[0].numbers == list(range(MANY))


async def test_drain_calls_then_after_the_last_completion(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        for count in (2, MANY):
            seen: list[int] = []
            rig.handlers[0].numbers.clear()
            rig.complete(0, 0, *range(count))

            def then(seen: list[int] = seen) -> None:
                seen.append(len(rig.handlers[0].numbers))

            rig.loop_device.drain(rig.queues[0], then)
            assert seen == ([2] if count == 2 else [])
            await loops.sleep(1)
            assert seen == [count]


@pytest.mark.parametrize("how", ["poll", "arm", "read"])
async def test_a_queue_or_channel_that_fails_fails_the_device_once(
    simulation: Simulation, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig_of(simulation) as rig:
        rig.handlers[0].on_failure = lambda: 1 // 0
        rig.break_by(how)
        rig.complete(1, 0, 2)
        await loops.sleep(1)
        assert rig.failures == [[errno.EIO], [errno.EIO]]
        polls = [raw.polls for raw in rig.raw]
        for _ in range(2):  # nothing is read or polled any more
            rig.loop_device.drain(rig.queues[0])
            rig.loop_device.poll_for(rig.queues[0], 1000)
            await loops.sleep(1)
        assert [raw.polls for raw in rig.raw] == polls
        assert polls[1] == 0
        free = rig.queues[0].free
        rig.loop_device.unreserve(rig.queues[0], 28)
        assert rig.queues[0].free == free + 28
    assert "sim0: " in caplog.text
    assert "could not handle the failure of sim0" in caplog.text


async def test_a_handler_can_detach_in_device_failed(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        rig.handlers[0].on_failure = lambda: rig.loop_device.detach(rig.keys[1])
        rig.break_by("poll")
        await loops.sleep(1)
        assert rig.failures == [[errno.EIO], [errno.EIO]]


async def test_poll_for_on_a_broken_queue_fails_the_device(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        rig.raw[0].poll_failure = -errno.EIO
        rig.loop_device.poll_for(rig.queues[0], 1000)
        assert rig.failures == [[errno.EIO], [errno.EIO]]


async def test_a_queue_that_fails_between_two_iterations_fails_the_device(
    simulation: Simulation,
) -> None:
    async with rig_of(simulation) as rig:
        first = POLL_BATCH * loop_device.MAX_BATCHES

        def on_complete() -> None:
            if len(rig.handlers[0].numbers) == first:
                rig.raw[0].poll_failure = -errno.EIO

        rig.handlers[0].on_complete = on_complete
        rig.complete(0, 0, *range(2 * first))
        rig.loop_device.drain(rig.queues[0])
        await loops.sleep(1)
        assert len(rig.handlers[0].numbers) == first
        assert rig.failures == [[errno.EIO], [errno.EIO]]


async def test_unreserve_frees_the_entries_when_the_queue_is_empty(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        queue = rig.queues[0]
        rig.complete(0, 0, *range(MANY))
        free = queue.free
        rig.loop_device.unreserve(queue, 28)
        assert queue.free == free
        await loops.sleep(1)
        assert queue.free == free + 28
        assert len(rig.handlers[0].numbers) == MANY


async def test_a_closed_loop_is_not_polled(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that handles a completion would start a timer, which needs an open loop."""

    class Closed:
        def is_closed(self) -> bool:
            return True

        def call_soon(self, callback: object) -> None:
            raise RuntimeError("the loop is closed")

    async with rig_of(simulation) as rig:
        queue = rig.queues[0]
        rig.complete(0, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(rig.loop_device, "_loop", Closed())
            free, queue.pollers, queue.is_armed = queue.free, 1, False
            rig.loop_device.unreserve(queue, 28)
            rig.loop_device.stop_polling(queue)
        assert (queue.free, queue.pollers, rig.raw[0].polls) == (free + 28, 0, 0)
        queue.is_arming_scheduled, queue.is_armed = False, True


async def test_more_entries_than_the_device_allows_are_refused(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        with pytest.raises(ValueError, match="sim0 allows a send_depth and recv_depth of 65536"):
            rig.loop_device.reserve((1 << 16) + 1)


# --- events and polling tasks ---


async def test_a_task_woken_by_a_completion_runs_before_the_queue_is_armed(
    simulation: Simulation,
) -> None:
    async with rig_of(simulation) as rig:
        future, arms = make_future(running_loop()), list[int]()

        async def wait() -> None:
            await future
            arms.append(rig.raw[0].arms)

        waiting = loops.create_task(wait())
        await loops.sleep(1e-6)
        rig.handlers[0].on_complete = lambda: future.set_result(None)
        rig.complete(0, 0, 3)
        await waiting
        if not loops.on_trio():  # trio has no inline wake-ups
            assert arms == [1]
        await loops.sleep(1)
        assert rig.raw[0].arms == 2


async def test_a_completion_that_comes_before_the_queue_is_armed_is_found(
    simulation: Simulation,
) -> None:
    async with rig_of(simulation) as rig:
        numbers = rig.handlers[0].numbers

        def complete_more() -> None:
            if len(numbers) < 2:
                rig.complete(0, 0, 4)

        rig.handlers[0].on_complete = complete_more
        rig.complete(0, 0, 3)
        await loops.sleep(1)
        assert numbers == [3, 4]
        assert rig.queues[0].is_armed


async def test_a_queue_is_not_armed_while_a_task_polls(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        queue, raw = rig.queues[0], rig.raw[0]
        queue.pollers = 2
        rig.complete(0, 0, 1)
        await loops.sleep(1)
        assert (rig.handlers[0].numbers, queue.is_armed, raw.arms) == ([1], False, 1)
        rig.loop_device.stop_polling(queue)
        rig.complete(0, 0, 2)
        await loops.sleep(1)
        assert (raw.arms, rig.handlers[0].numbers) == (1, [1])
        rig.loop_device.stop_polling(queue)
        assert raw.arms == 1  # only in the next iteration: the task might poll again
        await loops.sleep(1)
        assert (raw.arms, rig.handlers[0].numbers) == (2, [1, 2])
        queue.pollers = 1
        rig.loop_device.stop_polling(queue)  # it is armed already
        await loops.sleep(1)
        assert raw.arms == 2


async def test_a_queue_is_armed_once_after_tasks_poll_again_and_again(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(simulation) as rig:
        queue = rig.queues[0]
        queue.is_armed = False
        if not loops.on_trio():  # call_soon_threadsafe() would write to a socket and read it
            monkeypatch.setattr(running_loop(), "call_soon_threadsafe", pytest.fail)
        for _ in range(3):
            queue.pollers += 1
            rig.loop_device.stop_polling(queue)
        queue.pollers += 1
        await loops.sleep(1)
        assert rig.raw[0].arms == 1
        rig.loop_device.stop_polling(queue)
        await loops.sleep(1)
        assert rig.raw[0].arms == 2
        monkeypatch.undo()


async def test_draining_ends_when_the_reading_stops(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        seen: list[int] = []
        rig.complete(0, 0, *range(MANY))
        rig.loop_device.drain(rig.queues[0], lambda: seen.append(len(rig.handlers[0].numbers)))
        rig.loop_device._stop_reading()
        await loops.sleep(1)
        assert seen == [POLL_BATCH * loop_device.MAX_BATCHES]


async def test_a_queue_is_not_armed_after_the_reading_has_stopped(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        queue = rig.queues[0]
        rig.handlers[0].on_complete = rig.loop_device._stop_reading
        rig.complete(0, 0, 3)
        await loops.sleep(1)
        queue.pollers, queue.is_armed = 1, False
        rig.loop_device.stop_polling(queue)
        await loops.sleep(1)
        assert rig.raw[0].arms == 1


async def test_a_removed_device_fails_each_connection(simulation: Simulation) -> None:
    async with aiordma.listen(simulation.far.host, 7471) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect(simulation.far.host, 7471) as connection:
            accepted = await accepting
            waiting = loops.create_task(connection.recv())
            await loops.sleep(1)
            call_threadsafe(running_loop(), lambda: simulation.cm.remove_device(simulation.near))
            with pytest.raises(DeviceRemoved):
                await waiting
            await accepted.aclose()
