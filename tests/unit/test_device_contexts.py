"""Closing removed devices: the references to their contexts, and the calls of librdmacm."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import DeviceRemoved, VerbsError
from aiordma.rdmacm import contexts as contexts_module
from aiordma.rdmacm.contexts import DeviceContexts, detach, has_node
from aiordma.rdmacm.device_thread import SUBSYSTEM, DeviceThread, has_changes, open_uevents
from aiordma.verbs.context_references import ContextReferences

RXE, SIW, NEW_RXE = "rxe0", "siw0", "rxe0 again"


class FakeDevice:
    def __init__(self, context: str) -> None:
        self.context = context
        self.name = context


class FakeList:
    def __init__(self, contexts: set[str]) -> None:
        self.contexts = frozenset(contexts)
        self.freed = False

    def free(self) -> None:
        assert not self.freed
        self.freed = True


class Librdmacm:
    """The devices of a machine, and a record of the calls about them."""

    def __init__(self) -> None:
        self.present: set[str] = {RXE, SIW}
        self.nodes: set[str] = set()
        self.error = errno.ENODEV
        self.lists: list[FakeList] = []
        self.detached: list[str] = []
        self.removed: list[str] = []
        self.references = ContextReferences()
        self.table = DeviceContexts(self.references)
        self.table.on_removed = lambda device: self.removed.append(device.name)
        self.table._thread.submit = lambda job: job()  # type: ignore[method-assign]
        self.table._thread.call = lambda function: function()  # type: ignore[method-assign]

    def get(self) -> FakeList:
        if not self.present:
            raise VerbsError(self.error, "rdma_get_devices")
        self.lists.append(FakeList(self.present))
        return self.lists[-1]

    @property
    def open_lists(self) -> list[set[str]]:
        return [set(listed.contexts) for listed in self.lists if not listed.freed]


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Librdmacm:
    made = Librdmacm()
    monkeypatch.setattr(contexts_module, "ContextList", made)
    monkeypatch.setattr(contexts_module, "Device", FakeDevice)
    monkeypatch.setattr(contexts_module, "detach", made.detached.append)
    monkeypatch.setattr(contexts_module, "has_node", lambda context: context in made.nodes)
    return made


def test_opened_devices_are_referenced_until_they_are_released(lib: Librdmacm) -> None:
    first, second = lib.table.open(), lib.table.open()
    assert {device.name for device in first} == {RXE, SIW}
    lib.table.release(first)
    assert lib.references.has(RXE)  # type: ignore[arg-type]
    lib.table.release(second)
    assert not lib.references.has(RXE)  # type: ignore[arg-type]
    assert lib.open_lists == [{RXE, SIW}]


def test_opening_without_a_device_raises(lib: Librdmacm) -> None:
    lib.present = set()
    with pytest.raises(VerbsError, match="no RDMA device"):
        lib.table.open()


def test_a_removed_device_is_reported_once_and_closed(lib: Librdmacm) -> None:
    lib.table.release(lib.table.open())
    lib.present = {SIW}
    lib.table.check_soon()
    lib.table.check_soon()
    assert lib.removed == [RXE]
    assert lib.open_lists == [{SIW}]
    assert lib.detached == []


def test_a_removed_device_is_closed_with_its_last_reference(lib: Librdmacm) -> None:
    devices = lib.table.open()
    rxe = next(device for device in devices if device.name == RXE)
    assert not lib.table.is_removed(rxe)
    lib.present = {SIW}
    lib.table.check_soon()
    assert lib.table.is_removed(rxe)
    assert {RXE, SIW} in lib.open_lists
    lib.table.release(devices)
    assert lib.open_lists == [{SIW}]
    assert not lib.table.is_removed(rxe)  # another context can have its address now


def test_the_last_device_is_detached_as_librdmacm_does_not_close_it(lib: Librdmacm) -> None:
    devices = lib.table.open()
    lib.present = set()
    lib.table.check_soon()
    assert set(lib.removed) == {RXE, SIW}
    assert lib.detached == []
    lib.table.release(devices)
    assert sorted(lib.detached) == [RXE, SIW]
    assert lib.open_lists == [{RXE, SIW}]
    lib.table.check_soon()
    assert len(lib.detached) == 2
    lib.present = {NEW_RXE}
    lib.table.check_soon()
    assert lib.open_lists == [{NEW_RXE}]
    assert len(lib.removed) == 2


def test_a_device_that_still_has_its_node_is_not_removed(lib: Librdmacm) -> None:
    """Listing the devices also fails with ENODEV if there is no free descriptor."""
    lib.table.release(lib.table.open())
    lib.present, lib.nodes = set(), {RXE, SIW}
    lib.table.check_soon()
    assert (lib.removed, lib.detached) == ([], [])
    lib.nodes = {SIW}
    lib.table.check_soon()
    assert (lib.removed, lib.detached) == ([RXE], [RXE])


def test_a_device_that_is_not_listed_yet_can_be_acquired(lib: Librdmacm) -> None:
    lib.table.release(lib.table.open())
    lib.present = {SIW, NEW_RXE}
    known: Any = FakeDevice(SIW)
    lib.table.acquire(known)
    assert len(lib.lists) == 1
    found: Any = FakeDevice(NEW_RXE)
    lib.table.acquire(found)
    assert lib.open_lists == [{SIW, NEW_RXE}]
    assert lib.references.has(SIW)  # type: ignore[arg-type]
    assert lib.references.has(NEW_RXE)  # type: ignore[arg-type]


@pytest.mark.parametrize("referenced", [False, True])
def test_acquiring_a_removed_device_raises(lib: Librdmacm, referenced: bool) -> None:
    """An id can still be bound to it."""
    devices = lib.table.open()
    rxe = next(device for device in devices if device.name == RXE)
    if not referenced:
        lib.table.release(devices)
    lib.present = {SIW}
    lib.table.check_soon()
    with pytest.raises(DeviceRemoved, match=RXE):
        lib.table.acquire(rxe)
    assert lib.references.has(RXE) is referenced  # type: ignore[arg-type]


def test_a_detached_context_has_dev_null_in_place_of_its_descriptors() -> None:
    fds = [os.eventfd(0), os.eventfd(0)]
    context: Any = SimpleNamespace(cmd_fd=fds[0], async_fd=fds[1])
    detach(context)
    for fd in fds:
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
        assert not os.get_inheritable(fd)
    assert has_node(context)
    for fd in fds:
        os.close(fd)


# --- the thread ---


@pytest.fixture
def thread() -> DeviceThread:
    return DeviceThread(lambda: None)


def is_running(thread: DeviceThread) -> bool:
    """Return `thread.running`. mypy takes the attribute for unchanged after an assertion."""
    return thread.running


def test_calls_are_made_by_one_thread(thread: DeviceThread) -> None:
    assert not thread.running
    names = {thread.call(threading.get_ident) for _ in range(3)}
    assert len(names) == 1
    assert names != {threading.get_ident()}
    assert is_running(thread)
    assert thread.call(lambda: thread.call(threading.get_ident)) in names


def test_an_exception_of_a_call_is_raised_in_the_caller(thread: DeviceThread) -> None:
    def fail() -> None:
        raise VerbsError(errno.ENODEV, "rdma_get_devices")

    with pytest.raises(VerbsError, match="rdma_get_devices"):
        thread.call(fail)
    assert thread.call(lambda: 1) == 1


def test_a_job_is_dropped_if_the_thread_does_not_run(thread: DeviceThread) -> None:
    thread.submit(lambda: pytest.fail("it was called"))
    assert not thread.running


def test_a_job_is_done_by_the_thread(thread: DeviceThread) -> None:
    done = threading.Event()
    thread.call(lambda: None)
    thread.submit(done.set)
    assert done.wait(10)


def test_in_a_forked_child_the_caller_makes_the_call(
    thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.call(lambda: None)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert not thread.running
    assert thread.call(threading.get_ident) == threading.get_ident()


def test_if_no_thread_can_start_the_caller_makes_the_call(
    thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert thread.call(threading.get_ident) == threading.get_ident()
    assert not thread.running


REMOVED = b"\0".join([b"remove@/x/uverbs0", b"ACTION=remove", SUBSYSTEM, b""])
OTHER = b"\0".join([b"add@/x/loop0", b"ACTION=add", b"SUBSYSTEM=block", b""])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([], False), ([OTHER], False), ([OTHER, REMOVED, OTHER], True), ([REMOVED], True)],
)
def test_a_message_about_an_rdma_device_is_a_change(messages: list[bytes], expected: bool) -> None:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        ours.setblocking(False)
        for message in messages:
            kernels.send(message)
        assert has_changes(ours) is expected
        assert has_changes(ours) is False


def test_lost_messages_count_as_a_change() -> None:
    def recv(size: int) -> bytes:
        raise OSError(errno.ENOBUFS, "too slow")

    lossy: Any = SimpleNamespace(recv=recv)
    assert has_changes(lossy)


def test_a_sandbox_without_uevents_has_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(socket, "socket", refuse)
    assert open_uevents() is None


def test_a_change_calls_on_change(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    opened: Callable[[], socket.socket] = lambda: ours  # noqa: E731
    monkeypatch.setattr("aiordma.rdmacm.device_thread.open_uevents", opened)
    thread = DeviceThread(changed.set)
    thread.call(lambda: None)
    kernels.send(OTHER)
    thread.call(lambda: None)
    assert not changed.is_set()
    kernels.send(REMOVED)
    assert changed.wait(10)
    kernels.close()
