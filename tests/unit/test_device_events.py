"""Device events: subscriptions, events of queue pairs, watches, and devices that are removed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import loops
import pytest
from simulator import Simulation
from simulator.cm import Id as SimulatedId
from simulator.ids import listening, resolved
from simulator.verbs import Device as SimulatedDevice
from simulator.world import ffi

import aiordma
from aiordma import DeviceRemoved, PeerClosed, RdmaError, VerbsError
from aiordma.dispatch import DeviceSubscription, device_events, failure_of
from aiordma.dispatch.queue_pair_events import QueuePairEvents
from aiordma.enums import AsyncEventType
from aiordma.loop import running_loop
from aiordma.rdmacm import device_addresses, device_contexts, parse_address
from aiordma.rdmacm.contexts import DeviceContexts, detach, has_node
from aiordma.rdmacm.device_thread import SUBSYSTEM, DeviceThread, has_changes, open_uevents
from aiordma.verbs import (
    AsyncEvent,
    CompletionChannel,
    CompletionQueue,
    Device,
    ProtectionDomain,
    QueuePair,
    QueuePairCaps,
    QueuePairInit,
)
from aiordma.verbs.context_references import ContextReferences

E = AsyncEventType
FAR, PORT = "10.0.0.2", 7471
DOWN, UP = (AsyncEvent("sim0", kind, 1) for kind in (E.PORT_ERR, E.PORT_ACTIVE))
GONE, OTHER_GONE = (AsyncEvent(name, E.DEVICE_FATAL) for name in ("sim0", "sim1"))


async def port_events(simulation: Simulation, *kinds: AsyncEventType) -> None:
    for kind in kinds:
        simulation.near.raise_event(kind, port_num=1)
    await loops.sleep(1)


async def near_device(simulation: Simulation) -> Device:
    async with await resolved(simulation) as cm_id:
        return cm_id.device()


def subscribe(device: Device, handler: Callable[[AsyncEvent], object]) -> DeviceSubscription:
    made = DeviceSubscription(running_loop(), device, handler)  # type: ignore[arg-type]
    made.start()
    return made


async def test_all_subscriptions_get_each_event_until_they_are_stopped(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    device, seen = await near_device(simulation), [list[AsyncEvent](), list[AsyncEvent]()]
    first, second = (subscribe(device, one.append) for one in seen)
    broken = subscribe(device, lambda event: 1 // 0)
    await port_events(simulation, E.PORT_ERR, E.PORT_ACTIVE)
    assert seen == [[DOWN, UP], [DOWN, UP]]
    assert "could not handle PORT_ERR of sim0" in caplog.text
    for one in (first, first, broken):
        one.stop()
    stopping = subscribe(device, lambda event: stopped.stop())
    stopped = subscribe(device, seen[0].append)
    await port_events(simulation, E.PORT_ERR)
    assert [len(one) for one in seen] == [2, 3]
    stopping.stop()
    second.stop()
    assert not device_events._readers


async def test_subscriptions_of_other_loops_get_each_event(simulation: Simulation) -> None:
    device, here, there = await near_device(simulation), list[AsyncEvent](), list[AsyncEvent]()
    other = asyncio.new_event_loop()
    second = DeviceSubscription(other, device, there.append)
    subscription = subscribe(device, here.append)
    second.start()
    other.remove_reader(device.async_fd)  # the loop of the test reads all events
    await port_events(simulation, E.PORT_ERR, E.PORT_ACTIVE)
    thread = threading.Thread(target=lambda: other.run_until_complete(asyncio.sleep(0)))
    thread.start()
    thread.join()
    assert here == there == [DOWN, UP]
    other.close()
    second.stop()
    subscription.stop()


@pytest.mark.parametrize("is_noticed", ["by an event", "by the list of devices"])
async def test_a_removal_is_one_event(simulation: Simulation, is_noticed: str) -> None:
    device, seen = await near_device(simulation), list[AsyncEvent]()
    device.acquire()
    subscription = subscribe(device, seen.append)
    if is_noticed == "by an event":
        simulation.cm.remove_device(simulation.near)
    else:
        simulation.near.removed = True
        device_contexts.check_soon()
    await loops.sleep(1)
    assert seen == [GONE]
    device_contexts.check_soon()
    second = subscribe(device, seen.append)
    await loops.sleep(1)
    assert seen == [GONE, GONE]  # each has it once
    for one in (subscription, second):
        one.stop()
    late = subscribe(device, seen.append)  # with a new reader
    await loops.sleep(1)
    assert seen == [GONE] * 3
    late.stop()
    device.release()


async def test_a_device_that_failed_before_a_subscription_is_reported(
    simulation: Simulation,
) -> None:
    """It is still in the list of devices, and an earlier subscription exists."""
    device, seen = await near_device(simulation), list[AsyncEvent]()
    first = subscribe(device, lambda event: None)
    simulation.near.raise_event(E.DEVICE_FATAL)
    await loops.sleep(1)
    second = subscribe(device, seen.append)
    await loops.sleep(1)
    assert seen == [GONE]
    for one in (first, second):
        one.stop()


def test_each_event_reaches_the_handlers_of_its_queue_pair_or_queue() -> None:
    events, seen = QueuePairEvents(), list[int]()
    queues: list[Any] = [SimpleNamespace(element=number) for number in (1, 2)]
    for key in range(10):
        qp: Any = SimpleNamespace(element=100 + key)
        events.add(key, qp, queues[key % 2], lambda event, key=key: seen.append(key))  # type: ignore[misc]
    events.remove(103)  # no queue pair has this key
    events.remove(3)
    for element in (104, 103, 999):
        events.dispatch(AsyncEvent("sim0", E.QP_FATAL, 0, element))
    for element in (1, 2, 999):
        events.dispatch(AsyncEvent("sim0", E.CQ_ERR, 0, element))
    assert seen == [4, 0, 2, 4, 6, 8, 1, 5, 7, 9]
    for key in range(10):
        events.remove(key)
    assert events._handlers == {}


class NotSearched(dict[Any, Any]):
    """A table that can only be looked up by a key."""

    def refuse(self, *_: object) -> Any:
        raise AssertionError("an event searches the handlers of all queue pairs")

    __iter__ = keys = values = items = copy = __or__ = refuse


def test_an_event_is_dispatched_without_a_search() -> None:
    """Its cost must not grow with the number of queue pairs."""
    events, seen = QueuePairEvents(), list[AsyncEvent]()
    queue: Any = SimpleNamespace(element=1)
    for table in ("_handlers", "_elements"):
        setattr(events, table, NotSearched())
    for key in range(10):
        qp: Any = SimpleNamespace(element=100 + key)
        events.add(key, qp, queue, seen.append)
    event = AsyncEvent("sim0", E.QP_FATAL, 0, 104)
    events.dispatch(event)
    assert seen == [event]
    events.remove(4)
    events.dispatch(event)
    assert seen == [event]


async def test_an_event_of_a_destroyed_queue_pair_does_not_reach_the_next_one(
    simulation: Simulation,
) -> None:
    """Whatever address the next one has, its events have another number."""
    async with await resolved(simulation) as cm_id:
        pd = ProtectionDomain(cm_id.device())
        channel = CompletionChannel(cm_id.device())
        channel.device.watch_async_events()
        cq = CompletionQueue(channel, 10)
        init = QueuePairInit(QueuePairCaps(max_send_wr=1, max_recv_wr=1), cq, cq)
        elements = set()
        for _ in range(3):
            qp = QueuePair.create(pd, init)
            elements.add(qp.element)
            simulation.near.raise_event(E.QP_FATAL, qp.pointer)
            (event,) = cm_id.device().get_async_events()
            qp.destroy()
            assert event.element == qp.element
        assert len(elements | {cq.element}) == 4
        for one in (cq, channel, pd):
            one.close()


def test_failure_of_returns_an_error_that_names_the_event() -> None:
    for kind in (E.QP_FATAL, E.QP_REQ_ERR, E.QP_ACCESS_ERR, E.CQ_ERR):
        failure = failure_of(AsyncEvent("sim0", kind, 0, 0x10))
        assert type(failure) is RdmaError
        assert kind.name in str(failure)
    for kind in (E.COMM_EST, E.SQ_DRAINED, E.PORT_ERR):
        assert failure_of(AsyncEvent("sim0", kind)) is None


@pytest.mark.transport("IB")
@pytest.mark.parametrize(("peer_closes", "kind"), [(False, RdmaError), (True, PeerClosed)])
async def test_a_queue_pair_that_failed_ends_its_connection(
    simulation: Simulation, peer_closes: bool, kind: type[RdmaError]
) -> None:
    async with aiordma.listen(FAR, PORT) as listener:
        tasks = [loops.create_task(aiordma.connect(FAR, PORT)) for _ in range(2)]
        served = [await listener.accept() for _ in tasks]
        failed, other = [await task for task in tasks]
        qp = simulation.cm.id_of(failed._endpoint.cm).qp
        assert qp is not None
        simulation.near.raise_event(E.QP_REQ_ERR, ffi.addressof(qp.pointer.qp))
        await loops.sleep(0.1)
        assert not failed.closed
        if peer_closes:  # a better cause
            for one in served:
                one.abort()
        with pytest.raises(kind, match="closed" if peer_closes else "QP_REQ_ERR"):
            await failed.recv()
        if peer_closes:
            with pytest.raises(PeerClosed):
                await other.recv()
        else:
            assert not other.closed
        for one in (*served, failed, other):
            await one.aclose()


@pytest.mark.transport("IB")
@pytest.mark.parametrize("has_event", [True, False])
async def test_received_data_establishes_an_accepting_connection(
    simulation: Simulation, has_event: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_event:
        monkeypatch.setattr(simulation.cm, "first_message", Mock())
    async with aiordma.listen(FAR, PORT) as listener:
        accepting = loops.create_task(listener.accept())
        simulation.cm.lose_ready = True
        async with await aiordma.connect(FAR, PORT) as connection:
            await connection.send(b"first")
            async with await accepting as accepted:
                assert await accepted.recv() == b"first"
    assert simulation.world.calls.counts["rdma_notify"] >= 1


async def test_a_watch_returns_events_in_order(simulation: Simulation) -> None:
    async with aiordma.watch_devices() as watch:
        assert repr(watch) == "<DeviceWatch of sim0, sim1>"
        await port_events(simulation, E.PORT_ERR, E.PORT_ACTIVE, E.PORT_ERR)
        assert [await anext(watch) for _ in range(3)] == [DOWN, UP, DOWN]
        task = loops.create_task(anext(watch))
        await loops.sleep(1)
        watch._append(DOWN, watch._subscriptions[0].device)
        task.cancel()  # loses no event
        await loops.wait([task])
        if task.cancelled():
            assert await anext(watch) == DOWN


async def test_a_watch_ends_with_its_last_device(simulation: Simulation) -> None:
    async with aiordma.watch_devices() as watch:
        await port_events(simulation, E.PORT_ERR)
        simulation.cm.remove_device(simulation.near)
        await loops.sleep(1)
        assert list(watch.devices) == ["sim1"]
        simulation.cm.remove_device(simulation.far)
        assert [one async for one in watch] == [DOWN, GONE, OTHER_GONE]
        assert list(watch.devices) == []
        assert not device_events._readers


async def test_a_watch_that_fails_to_start_stops_its_subscriptions(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: Device) -> int:
        if len(device_events._readers) == 1:
            raise VerbsError(errno.EBADF, "fcntl")
        return device.async_fd

    monkeypatch.setattr(Device, "watch_async_events", fail)
    with pytest.raises(VerbsError):
        async with aiordma.watch_devices():
            pytest.fail("it was entered")
    assert not device_events._readers


async def test_a_removed_device_cannot_be_used_and_an_added_one_can(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The added one is not listed yet when an id is bound to it."""
    hosts = [parse_address(host) for host in ("127.0.0.1", "10.0.0.1", "10.9.9.9")]
    interfaces = list(zip(("lo", "eth0", "eth1"), hosts, strict=True))
    monkeypatch.setattr("aiordma.rdmacm.devices.interface_addresses", lambda: interfaces)
    async with listening(simulation), await resolved(simulation) as cm_id:
        (found,) = device_addresses()
        assert (found.host, found.interface, found.device) == ("10.0.0.1", "eth0", "sim0")
        simulation.cm.remove_device(simulation.near)
        await loops.sleep(1)
        with pytest.raises(DeviceRemoved, match="sim0"):
            await cm_id.reg_msgs(bytearray(8))
    added = SimulatedDevice("sim2", "10.0.0.3", iwarp=simulation.near.is_iwarp)
    simulation.cm.devices.append(added)
    async with aiordma.listen("10.0.0.3", PORT) as listener:
        accepting = loops.create_task(listener.accept())
        async with await aiordma.connect("10.0.0.3", PORT), await accepting as accepted:
            assert accepted.local_address == ("10.0.0.3", PORT)


async def test_an_address_of_a_card_names_its_port(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rdma_cm binds the id to the port. This card has an address on its second port."""
    bind_device = SimulatedId.bind_device

    def bind_to_the_second(cm_id: SimulatedId, device: SimulatedDevice) -> None:
        bind_device(cm_id, device)
        cm_id.pointer.port_num = 2

    monkeypatch.setattr(SimulatedId, "bind_device", bind_to_the_second)
    interfaces = [("eth1", parse_address("10.0.0.1"))]
    monkeypatch.setattr("aiordma.rdmacm.devices.interface_addresses", lambda: interfaces)
    (found,) = device_addresses()
    assert (found.device, found.port_num) == ("sim0", 2)


def contexts() -> tuple[DeviceContexts, list[str]]:
    """Return a DeviceContexts that makes its calls at once, and the names of removed devices."""
    table, removed = DeviceContexts(ContextReferences()), list[str]()
    table.on_removed = lambda device: removed.append(device.name)
    table._thread.submit = lambda job: job()  # type: ignore[method-assign]
    return table, removed


def listed(table: DeviceContexts) -> list[int]:
    """Return the number of devices in each list."""
    return [len(one.contexts) for one in table._lists]


async def test_a_removed_device_closes_with_its_last_reference(simulation: Simulation) -> None:
    table, removed = contexts()
    first, second = table.open(), table.open()
    assert {device.name for device in first} == {"sim0", "sim1"}
    near = next(device for device in first if device.name == "sim0")
    assert table.device_of(near.context) is table.device_of(near.context)
    assert not table.is_removed(near)
    table.release(first)
    assert table._references.has(near.context)
    simulation.near.removed = True
    for _ in range(2):
        table.check_soon()
    assert (removed, listed(table)) == (["sim0"], [2, 1])
    assert table.is_removed(near)
    with pytest.raises(DeviceRemoved, match="sim0"):
        table.acquire(near)
    table.release(second)
    assert listed(table) == [1]
    assert not table.is_removed(near)  # another context can have its address now
    with pytest.raises(DeviceRemoved, match="sim0"):
        table.acquire(near)
    table._lists[0].free()


async def test_the_last_device_is_detached(simulation: Simulation) -> None:
    table, removed = contexts()
    devices = table.open()
    paths = [f"/proc/self/fd/{device.context.cmd_fd}" for device in devices]
    simulation.near.removed = simulation.far.removed = True
    table.check_soon()
    assert sorted(removed) == ["sim0", "sim1"]
    assert os.devnull not in map(os.readlink, paths)
    table.release(devices)
    assert list(map(os.readlink, paths)) == [os.devnull] * 2
    with pytest.raises(VerbsError, match="no RDMA device"):
        table.open()
    simulation.cm.devices.append(SimulatedDevice("sim2", "10.0.0.3"))
    table.check_soon()
    assert (listed(table), len(removed)) == ([1], 2)
    table._lists[0].free()


async def test_a_device_that_still_has_its_node_is_not_removed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Listing the devices also fails with ENODEV if there is no free descriptor."""
    table, removed = contexts()
    table.release(table.open())
    monkeypatch.setattr("aiordma.rdmacm.contexts.has_node", lambda context: True)
    for code in (errno.ENODEV, errno.EACCES):
        assert "could not list the RDMA devices" not in caplog.text
        simulation.world.calls.fail("rdma_get_devices", code)
        table.check_soon()
    assert removed == []
    assert "could not list the RDMA devices" in caplog.text
    table._lists[0].free()


async def test_a_device_that_cannot_be_detached_is_detached_by_a_later_check(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table, removed = contexts()
    table.release(table.open())
    simulation.near.removed = simulation.far.removed = True
    without_descriptor = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patched:
        patched.setattr("aiordma.rdmacm.contexts.detach", without_descriptor)
        table.check_soon()
    assert without_descriptor.call_count == len(removed) == 2
    assert caplog.text.count("a removed device stays open: [Errno 24]") == 2
    assert not table._detached
    table.check_soon()
    assert len(table._detached) == 2
    table._lists[0].free()


def test_the_device_thread_survives_jobs_that_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    monkeypatch.setattr("aiordma.rdmacm.device_thread.open_uevents", lambda: ours)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    thread = DeviceThread(fail)
    for cause in (lambda: thread.submit(fail), lambda: kernels.send(REMOVED)):
        assert thread.call(lambda: 1) == 1
        failed.clear()
        cause()
        assert failed.wait(10)
    assert thread.call(lambda: 2) == 2
    assert caplog.text.count("a job of the device thread failed") == 2
    kernels.close()


def test_a_detached_context_has_dev_null_in_place_of_its_descriptors() -> None:
    fds = [os.eventfd(0), os.eventfd(0)]
    context: Any = SimpleNamespace(cmd_fd=fds[0], async_fd=fds[1])
    assert not has_node(context)
    detach(context)
    assert has_node(context)
    for fd in fds:
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_calls_and_jobs_are_made_by_one_thread() -> None:
    thread, done = DeviceThread(lambda: None), threading.Event()
    thread.submit(lambda: pytest.fail("it was called before the thread was started"))
    assert not thread.running
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    names = {thread.call(threading.get_ident) for _ in range(3)}
    assert len(names | {threading.get_ident()}) == 2
    assert thread.call(lambda: thread.call(threading.get_ident)) in names
    thread.submit(done.set)
    assert done.wait(10)


def test_a_thread_without_a_descriptor_is_a_typed_error() -> None:
    thread, failure = DeviceThread(lambda: None), OSError(errno.EMFILE, "Too many open files")
    with (
        patch.object(os, "eventfd", side_effect=failure),
        pytest.raises(VerbsError, match="eventfd") as caught,
    ):
        thread.call(lambda: 1)
    assert caught.value.errno == errno.EMFILE
    assert thread.call(lambda: 1) == 1


def test_without_a_thread_the_caller_makes_the_call() -> None:
    """In a forked child, and if no thread can start."""
    thread = DeviceThread(lambda: None)
    thread.call(lambda: None)
    with patch.object(os, "getpid", return_value=1):
        assert thread.call(threading.get_ident) == threading.get_ident()
        assert not thread.running
    thread = DeviceThread(lambda: None)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError):
        assert thread.call(threading.get_ident) == threading.get_ident()
    assert not thread.running


REMOVED = b"\0".join([b"remove@/x/uverbs0", b"ACTION=remove", SUBSYSTEM, b""])
OTHER = b"\0".join([b"add@/x/loop0", b"ACTION=add", b"SUBSYSTEM=block", b""])


def test_a_message_about_an_rdma_device_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy: Any = Mock(recv=Mock(side_effect=OSError(errno.ENOBUFS, "too slow")))
    assert has_changes(lossy)  # lost messages count as a change
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    for messages in ([], [OTHER], [OTHER, REMOVED, OTHER], [REMOVED]):
        for message in messages:
            kernels.send(message)
        assert has_changes(ours) is (REMOVED in messages)
        assert has_changes(ours) is False
    changed = threading.Event()
    monkeypatch.setattr("aiordma.rdmacm.device_thread.open_uevents", lambda: ours)
    thread = DeviceThread(changed.set)
    kernels.send(OTHER)
    thread.call(lambda: None)
    assert not changed.is_set()
    kernels.send(REMOVED)
    assert changed.wait(10)
    kernels.close()


def test_a_sandbox_without_uevents_has_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", Mock(side_effect=PermissionError))
    assert open_uevents() is None
