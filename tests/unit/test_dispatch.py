"""CmDispatcher and LoopDevice: events and completions reach their handlers; failures end waits."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import helpers
import loops
import pytest
from simulator import Simulation
from simulator.ids import connect, listening, resolved, target
from simulator.pairs import PORT, CtrlC
from simulator.verbs import CompletionQueue
from simulator.world import ffi, lib

import aiordma
from aiordma import DeviceRemoved, Listener, LocalClosed, Rejected, VerbsError
from aiordma.cm import AsyncCmId, CmState
from aiordma.dispatch import KEY_SHIFT, LoopDevice, device_events, loop_device
from aiordma.dispatch.loop_device import RELEASE_BATCH
from aiordma.enums import AsyncEventType, CmEventType
from aiordma.loop import make_future, running_loop
from aiordma.options import ConnectionOptions, ListenerLimits
from aiordma.qp import resources
from aiordma.rdmacm import CmEvent
from aiordma.verbs.completion import POLL_BATCH
from aiordma.verbs.device import SIW_VENDOR_ID
from aiordma.verbs.offset_guard import ENTRIES, offset_guards

E, S = CmEventType, CmState


async def test_a_request_for_a_closing_listener_is_rejected(simulation: Simulation) -> None:
    """The id of the request is destroyed before its channel is closed."""
    async with listening(simulation) as listener, await resolved(simulation) as active:
        simulation.world.calls.delay("rdma_destroy_id", before=1)
        listener.abort()
        with pytest.raises(Rejected):
            await connect(active)


async def test_a_failed_channel_of_a_listener_ends_only_it(
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


async def test_a_request_is_not_moved_to_a_failed_channel(simulation: Simulation) -> None:
    """No event would be read from it: the request is rejected."""
    calls = simulation.world.calls
    async with listening(simulation) as listener, await resolved(simulation) as active:
        connecting = loops.create_task(connect(active))
        await loops.sleep(1)
        assert listener.requests_waiting == 1
        moved = calls.counts["rdma_migrate_id"]
        simulation.cm.fail_channels(simulation.cm.id_of(active).channel)
        for wait in (connecting, listener.get_request()):
            with pytest.raises(DeviceRemoved):
                await wait
        assert listener.requests_waiting == 0
        assert calls.counts["rdma_migrate_id"] == moved


async def test_a_failed_channel_ends_all_waits(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    closed, calls = await AsyncCmId.create(), simulation.world.calls
    await closed.aclose()
    cms = [await AsyncCmId.create() for _ in range(2)]
    for one in cms:
        one.listen()
    listening = Listener(cms, ConnectionOptions(), ListenerLimits())
    async with listening as listener, await AsyncCmId.create() as broken:
        broken.on_change = lambda: 1 // 0  # type: ignore[assignment]
        ids = [await AsyncCmId.create() for _ in range(2)]
        simulation.cm.hold(E.ADDR_RESOLVED)
        simulation.cm.put(broken, E.ADDR_CHANGE)
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
        broken.on_change = None
    for event in ("ADDR_CHANGE", "DEVICE_REMOVAL"):  # the other ids got them nevertheless
        assert f"could not handle an event: RDMA_CM_EVENT_{event}" in caplog.text
    assert "event channel failed, and all its ids with it: " in caplog.text
    assert closed.state is S.CLOSED


class Rig:
    """A LoopDevice with two completion queues and two handlers."""

    def __init__(self, simulation: Simulation, device: LoopDevice) -> None:
        self.loop_device = device
        self.queues = [device.reserve(1 << 16) for _ in range(2)]
        self.raw = [simulation.world.objects[queue.cq.address].pointer for queue in self.queues]
        self.channel = simulation.world.objects[device._channel.address]  # type: ignore[union-attr]
        self.handlers = [Mock(), Mock()]
        self.keys = [device.attach(handler) for handler in self.handlers]
        device.start_reading()

    def complete(self, queue: int, handler: int, *numbers: int) -> None:
        """Add completions for a handler to a queue."""
        wc = ffi.new("struct ibv_wc *")
        for number in numbers:
            wc.wr_id = self.keys[handler] << KEY_SHIFT | number
            assert not lib.sim_complete(self.raw[queue], wc, ffi.NULL, 0, False)

    @property
    def numbers(self) -> list[list[int]]:
        """The completions of each handler."""
        return [[call.args[0] for call in one.complete.mock_calls] for one in self.handlers]

    @property
    def failures(self) -> list[list[int | None]]:
        """The errno of each failure of the device, for each handler."""
        return [
            [call.args[0].errno for call in one.device_failed.mock_calls] for one in self.handlers
        ]


@asynccontextmanager
async def rig_of(simulation: Simulation) -> AsyncIterator[Rig]:
    async with await resolved(simulation) as cm_id:
        device = LoopDevice.of(running_loop(), cm_id.device())
        rig = Rig(simulation, device)
        yield rig
        for handler, key in zip(rig.handlers, rig.keys, strict=True):
            handler.complete.side_effect = None
            device.detach(key)
        device.release()
        await loops.sleep(1)


async def test_completions_are_dispatched_to_their_handlers(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        rig.complete(0, 0, 0, 1, 2**32 - 1)
        rig.complete(0, 1, 7)
        rig.complete(1, 0, 5)
        await loops.sleep(1)
        assert rig.numbers == [[0, 1, 2**32 - 1, 5], [7]]
        rig.loop_device.detach(rig.keys[0])
        rig.complete(0, 0, 1)
        rig.complete(0, 1, 2)
        await loops.sleep(1)
        assert rig.numbers[1] == [7, 2]
        rig.loop_device.poll_for(rig.queues[0], 1000)
        rig.complete(1, 1, 3)
        rig.loop_device.poll_for(rig.queues[1], 1000)
        for _ in range(3):  # more often than there are events
            rig.loop_device.dispatcher.handle_event()
        assert rig.numbers[1] == [7, 2, 3]
        with pytest.raises(ValueError, match="sim0 allows a send_depth and recv_depth of 65536"):
            rig.loop_device.reserve((1 << 16) + 1)


async def test_a_handler_that_raises_keeps_no_other_from_its_completions(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig_of(simulation) as rig:
        notified, rig.handlers[0].complete.side_effect = list[int](), ZeroDivisionError
        on_notified = {rig.keys[0]: lambda: 1 // 0, rig.keys[1]: lambda: notified.append(1)}
        with patch.object(rig.loop_device, "_on_notified", on_notified):
            rig.complete(0, 0, 1)
            rig.complete(0, 1, 2)
            rig.loop_device.dispatcher.notified.extend(rig.keys)
            await loops.sleep(1)
        assert (rig.numbers, notified) == ([[1], [2]], [1])
    for text in ("a completion was not handled", "a connection was not notified"):
        assert f"sim0: {text}" in caplog.text


async def test_a_ctrl_c_in_a_handler_keeps_no_other_from_its_completions(
    simulation: Simulation,
) -> None:
    async with rig_of(simulation) as rig:
        on_notified = {rig.keys[0]: Mock(side_effect=CtrlC), rig.keys[1]: Mock()}
        rig.handlers[0].complete.side_effect = CtrlC
        with patch.object(rig.loop_device, "_on_notified", on_notified):
            rig.complete(0, 0, 1)
            rig.complete(0, 1, 2)
            rig.loop_device.dispatcher.notified.extend(rig.keys)
            with pytest.raises(CtrlC):
                rig.loop_device.poll_for(rig.queues[0], 1000)
        assert rig.numbers == [[1], [2]]
        assert [one.call_count for one in on_notified.values()] == [1, 1]


async def test_a_ctrl_c_loses_no_event_and_no_end_of_calls(simulation: Simulation) -> None:
    """They were taken already. The others belong to other ids."""
    seen = list[object]()

    def interrupted(what: object) -> None:
        seen.append(what)
        raise CtrlC

    async with await AsyncCmId.create() as cm_id:
        dispatcher = cm_id._dispatcher
        reader, calls = dispatcher._reader, dispatcher.call_reader
        event = CmEvent(E.ADDR_CHANGE, 0)
        with patch.multiple(reader, _dispatch=interrupted, _channel=Mock()):
            reader._channel.get_events.return_value = [event, event]  # type: ignore[attr-defined]
            with pytest.raises(CtrlC):
                reader._read()
        ends = [partial(interrupted, number) for number in range(2)]
        with patch.object(calls, "_ended", Mock(take=lambda: ends)), pytest.raises(CtrlC):
            calls.run()
    assert seen == [event, event, 0, 1]


FIRST = POLL_BATCH * loop_device.MAX_BATCHES
MANY = 12 * FIRST + 5  # each iteration of the loop takes up to three times FIRST


async def test_many_completions_do_not_block_the_loop(simulation: Simulation) -> None:
    """The entries of a queue pair are free after all of them, and drain() calls `then`."""
    async with rig_of(simulation) as rig:
        queue, complete, seen = rig.queues[0], rig.handlers[0].complete, list[int]()
        free = queue.free
        rig.loop_device.drain(queue, lambda: seen.append(complete.call_count))
        assert seen == [0]
        rig.complete(0, 0, *range(MANY))
        rig.loop_device.drain(queue, lambda: seen.append(complete.call_count))
        rig.loop_device.unreserve(queue, RELEASE_BATCH)
        assert (seen, queue.free) == ([0], free)
        counts = set[int]()
        while complete.call_count < MANY:
            counts.add(complete.call_count)
            await loops.sleep(0)
        assert len(counts) >= 2
        await loops.sleep(1)
        assert (rig.numbers[0], seen, queue.free) == (
            [*range(MANY)],
            [0, MANY],
            free + RELEASE_BATCH,
        )


@pytest.mark.parametrize("how", ["poll", "arm", "read", "poll_for"])
async def test_a_queue_or_channel_that_fails_fails_the_device_once(
    simulation: Simulation, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each handler is called, even if the first one raises and detaches the second one."""
    async with rig_of(simulation) as rig:
        first = rig.queues[0]

        def detach_and_raise(error: VerbsError) -> None:
            rig.loop_device.detach(rig.keys[1])
            raise ZeroDivisionError

        rig.handlers[0].device_failed.side_effect = detach_and_raise
        if how == "arm":
            rig.raw[0].arm_failure = errno.EIO
        elif how == "read":
            rig.channel.pointer.failure = errno.EIO
        else:
            rig.raw[0].poll_failure = -errno.EIO
        if how == "poll_for":
            rig.loop_device.poll_for(first, 1000)
        else:
            rig.complete(0, 0, 1)
        rig.complete(1, 0, 2)
        await loops.sleep(1)
        assert rig.failures == [[errno.EIO], [errno.EIO]]
        polls = [raw.polls for raw in rig.raw]
        for _ in range(2):  # nothing is read or polled any more
            rig.loop_device.drain(first)
            rig.loop_device.poll_for(first, 1000)
            simulation.near.raise_event(AsyncEventType.DEVICE_FATAL)
            await loops.sleep(1)
        assert [raw.polls for raw in rig.raw] == polls
        assert rig.failures == [[errno.EIO], [errno.EIO]]
        if how != "arm":  # on trio, queues are armed later: the second one is polled before
            assert polls[1] == 0
        free = first.free
        rig.loop_device.unreserve(first, RELEASE_BATCH)
        assert first.free == free + RELEASE_BATCH
    assert "sim0: " in caplog.text
    assert "could not handle the failure of sim0" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
async def test_draining_ends_with_its_queue_or_reading(simulation: Simulation, fails: bool) -> None:
    async with rig_of(simulation) as rig:
        complete, then = rig.handlers[0].complete, Mock()

        def fail_after_the_first(number: int, wc: object) -> None:
            if complete.call_count == FIRST and fails:
                rig.raw[0].poll_failure = -errno.EIO

        complete.side_effect = fail_after_the_first
        rig.complete(0, 0, *range(2 * FIRST))
        rig.loop_device.drain(rig.queues[0], then)
        if not fails:
            rig.loop_device._stop_reading()
        await loops.sleep(1)
        assert (complete.call_count, then.call_count) == (FIRST, 1)
        assert rig.failures == [[errno.EIO] * fails] * 2


async def test_few_entries_are_free_after_a_poll_together_with_more(simulation: Simulation) -> None:
    """Closing a small queue pair costs no poll. Until the next one, its entries are not free."""
    async with rig_of(simulation) as rig:
        queue, raw = rig.queues[0], rig.raw[0]
        free, polls = queue.free, raw.polls
        rig.loop_device.unreserve(queue, RELEASE_BATCH - 1)
        assert (queue.free, raw.polls) == (free, polls)
        rig.loop_device.unreserve(queue, 1)
        assert (queue.free, raw.polls) == (free + RELEASE_BATCH, polls + 1)


async def test_few_entries_are_free_when_they_are_needed(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        queue, raw = rig.queues[0], rig.raw[0]
        free, polls = queue.free, raw.polls
        rig.loop_device.unreserve(queue, 5)
        assert rig.loop_device.try_reserve(free + 6) is None
        assert (queue.free, raw.polls) == (free, polls)
        assert rig.loop_device.try_reserve(free + 5) is queue
        assert (queue.free, raw.polls) == (0, polls + 1)
        queue.free = free


async def test_a_closed_loop_is_not_polled(simulation: Simulation) -> None:
    """A connection that handles a completion would start a timer, which needs an open loop."""
    closed = SimpleNamespace(is_closed=lambda: True, call_soon=Mock(side_effect=RuntimeError))
    async with rig_of(simulation) as rig:
        queue = rig.queues[0]
        rig.complete(0, 0, 1)
        with patch.object(rig.loop_device, "_loop", closed):
            free, queue.pollers, queue.is_armed = queue.free, 1, False
            rig.loop_device.unreserve(queue, 28)
            rig.loop_device.stop_polling(queue)
        assert (queue.free, queue.pollers, rig.raw[0].polls) == (free + 28, 0, 0)
        queue.is_arming_scheduled, queue.is_armed = False, True


async def test_a_woken_task_runs_before_the_queue_is_armed(simulation: Simulation) -> None:
    async with rig_of(simulation) as rig:
        future, arms = make_future(running_loop()), list[int]()

        async def wait() -> None:
            await future
            arms.append(rig.raw[0].arms)

        waiting = loops.create_task(wait())
        await loops.sleep(1e-6)
        rig.handlers[0].complete.side_effect = lambda *_: future.set_result(None)
        rig.complete(0, 0, 3)
        await waiting
        if not loops.on_trio():  # trio has no inline wake-ups
            assert arms == [1]
        await loops.sleep(1)
        assert rig.raw[0].arms == 2


async def test_a_queue_is_not_armed_while_a_task_polls(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(simulation) as rig:
        queue, raw = rig.queues[0], rig.raw[0]
        queue.pollers = 2
        rig.complete(0, 0, 1)
        await loops.sleep(1)
        assert (rig.numbers[0], queue.is_armed, raw.arms) == ([1], False, 1)
        rig.loop_device.stop_polling(queue)
        rig.complete(0, 0, 2)
        await loops.sleep(1)
        assert (raw.arms, rig.numbers[0]) == (1, [1])
        with monkeypatch.context() as patched:
            if not loops.on_trio():  # call_soon_threadsafe() would write to a socket and read it
                patched.setattr(running_loop(), "call_soon_threadsafe", pytest.fail)
            for _ in range(3):  # tasks poll again and again: it is armed once
                rig.loop_device.stop_polling(queue)
                assert raw.arms == 1  # only in the next iteration: the task might poll again
                queue.pollers += 1
            await loops.sleep(1)
            assert raw.arms == 1
            rig.loop_device.stop_polling(queue)
            await loops.sleep(1)
        assert (raw.arms, rig.numbers[0]) == (2, [1, 2])
        queue.pollers = 1
        rig.loop_device.stop_polling(queue)  # it is armed already
        await loops.sleep(1)
        assert raw.arms == 2
        rig.handlers[0].complete.side_effect = lambda *_: rig.loop_device._stop_reading()
        rig.complete(0, 0, 3)
        await loops.sleep(1)
        queue.pollers, queue.is_armed = 1, False
        rig.loop_device.stop_polling(queue)  # the reading has stopped
        await loops.sleep(1)
        assert raw.arms == 2


async def test_a_device_that_could_not_be_opened_is_opened_later(simulation: Simulation) -> None:
    async with await resolved(simulation) as cm_id:
        device = LoopDevice.of(running_loop(), cm_id.device())
        for name in ("ibv_alloc_pd", "ibv_create_comp_channel"):
            simulation.world.calls.fail(name, errno.ENOMEM)
            with pytest.raises(VerbsError, match=name):
                device.reserve(4)
        device.reserve(4)
        device.release()


async def test_a_released_device_does_not_start_to_read(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker thread has asked for it before, and the end of the destruction overtook the call."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(resources, "call_threadsafe", lambda _, call: calls.append(call))
    with pytest.raises(Rejected):
        await aiordma.connect(simulation.far.host, PORT)
    devices = loop_device._loop_devices[running_loop()]
    await loops.until(lambda: not devices, "the device to be released")
    for call in calls:
        call()
    assert calls
    assert not device_events._readers


async def test_siw_gets_one_queue_that_occupies_memory_offsets(simulation: Simulation) -> None:
    """libsiw fails to create a queue pair at one offset. The last user releases the queue."""
    far = simulation.far
    far.vendor_id = SIW_VENDOR_ID

    def guards() -> list[CompletionQueue]:
        queues = simulation.world.all(CompletionQueue)
        return [queue for queue in queues if queue.channel == ffi.NULL]

    async with helpers.connected(far) as pair:
        device = pair.server._endpoint.device
        first = guards()
        assert [(queue.device, queue.pointer.capacity) for queue in first] == [(far, ENTRIES)]
        async with helpers.connected(far):
            assert guards() == first
        offset_guards.acquire(device)
    await loops.sleep(10)
    assert guards() == first
    offset_guards.release(device)
    assert guards() == []
    simulation.world.calls.fail("ibv_create_cq", errno.ENOMEM)
    with pytest.raises(VerbsError, match="ibv_create_cq"):
        offset_guards.acquire(device)
    assert guards() == []
