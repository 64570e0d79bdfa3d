"""Letting go of a device that is gone: who holds what, and what librdmacm is asked to do when."""

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
    """The devices of a machine, and what is asked about them."""

    def __init__(self) -> None:
        self.there: set[str] = {RXE, SIW}
        self.nodes: set[str] = set()
        self.error = errno.ENODEV
        self.lists: list[FakeList] = []
        self.emptied: list[str] = []
        self.removed: list[str] = []
        self.holds = ContextReferences()
        self.table = DeviceContexts(self.holds)
        self.table.on_removed = lambda device: self.removed.append(device.name)
        self.table._thread.submit = lambda job: job()  # type: ignore[method-assign]
        self.table._thread.call = lambda function: function()  # type: ignore[method-assign]

    def get(self) -> FakeList:
        if not self.there:
            raise VerbsError(self.error, "rdma_get_devices")
        self.lists.append(FakeList(self.there))
        return self.lists[-1]

    @property
    def kept(self) -> list[set[str]]:
        return [set(known.contexts) for known in self.lists if not known.freed]


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Librdmacm:
    made = Librdmacm()
    monkeypatch.setattr(contexts_module, "ContextList", made)
    monkeypatch.setattr(contexts_module, "Device", FakeDevice)
    monkeypatch.setattr(contexts_module, "detach", made.emptied.append)
    monkeypatch.setattr(contexts_module, "has_node", lambda context: context in made.nodes)
    return made


def test_opened_devices_are_held_until_they_are_let_go(lib: Librdmacm) -> None:
    first, second = lib.table.open(), lib.table.open()
    assert {device.name for device in first} == {RXE, SIW}
    lib.table.release(first)
    assert lib.holds.has(RXE)  # type: ignore[arg-type]
    lib.table.release(second)
    assert not lib.holds.has(RXE)  # type: ignore[arg-type]
    assert lib.kept == [{RXE, SIW}]


def test_without_a_device_there_is_nothing_to_open(lib: Librdmacm) -> None:
    lib.there = set()
    with pytest.raises(VerbsError, match="no RDMA device"):
        lib.table.open()


def test_a_device_that_goes_is_told_of_once_and_let_go(lib: Librdmacm) -> None:
    lib.table.release(lib.table.open())
    lib.there = {SIW}
    lib.table.check_soon()
    lib.table.check_soon()
    assert lib.removed == [RXE]
    assert lib.kept == [{SIW}]
    assert lib.emptied == []


def test_a_device_that_is_held_is_let_go_with_the_last_holder(lib: Librdmacm) -> None:
    devices = lib.table.open()
    rxe = next(device for device in devices if device.name == RXE)
    assert not lib.table.is_gone(rxe)
    lib.there = {SIW}
    lib.table.check_soon()
    assert lib.table.is_gone(rxe)
    assert {RXE, SIW} in lib.kept
    lib.table.release(devices)
    assert lib.kept == [{SIW}]
    assert not lib.table.is_gone(rxe)  # its address may be another's now


def test_the_last_device_is_emptied_as_librdmacm_does_not_close_it(lib: Librdmacm) -> None:
    devices = lib.table.open()
    lib.there = set()
    lib.table.check_soon()
    assert set(lib.removed) == {RXE, SIW}
    assert lib.emptied == []
    lib.table.release(devices)
    assert sorted(lib.emptied) == [RXE, SIW]
    assert lib.kept == [{RXE, SIW}]
    lib.table.check_soon()
    assert len(lib.emptied) == 2
    lib.there = {NEW_RXE}
    lib.table.check_soon()
    assert lib.kept == [{NEW_RXE}]
    assert len(lib.removed) == 2


def test_what_the_system_still_has_is_not_taken_for_gone(lib: Librdmacm) -> None:
    """Such as when there was no descriptor left to look for devices with: ENODEV again."""
    lib.table.release(lib.table.open())
    lib.there, lib.nodes = set(), {RXE, SIW}
    lib.table.check_soon()
    assert (lib.removed, lib.emptied) == ([], [])
    lib.nodes = {SIW}
    lib.table.check_soon()
    assert (lib.removed, lib.emptied) == ([RXE], [RXE])


def test_a_device_that_an_id_found_first_can_be_held(lib: Librdmacm) -> None:
    lib.table.release(lib.table.open())
    lib.there = {SIW, NEW_RXE}
    known: Any = FakeDevice(SIW)
    lib.table.acquire(known)
    assert len(lib.lists) == 1
    found: Any = FakeDevice(NEW_RXE)
    lib.table.acquire(found)
    assert lib.kept == [{SIW, NEW_RXE}]
    assert lib.holds.has(SIW)  # type: ignore[arg-type]
    assert lib.holds.has(NEW_RXE)  # type: ignore[arg-type]


@pytest.mark.parametrize("held", [False, True])
def test_nothing_more_is_made_from_a_device_that_is_gone(lib: Librdmacm, held: bool) -> None:
    """An id may still be bound to it."""
    devices = lib.table.open()
    rxe = next(device for device in devices if device.name == RXE)
    if not held:
        lib.table.release(devices)
    lib.there = {SIW}
    lib.table.check_soon()
    with pytest.raises(DeviceRemoved, match=RXE):
        lib.table.acquire(rxe)
    assert lib.holds.has(RXE) is held  # type: ignore[arg-type]


def test_an_emptied_context_has_dev_null_in_place_of_its_descriptors() -> None:
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


def test_calls_are_made_by_one_thread(thread: DeviceThread) -> None:
    assert not thread.running
    names = {thread.call(threading.get_ident) for _ in range(3)}
    assert len(names) == 1
    assert names != {threading.get_ident()}
    assert thread.running
    assert thread.call(lambda: thread.call(threading.get_ident)) in names


def test_what_a_call_raises_is_the_callers(thread: DeviceThread) -> None:
    def fail() -> None:
        raise VerbsError(errno.ENODEV, "rdma_get_devices")

    with pytest.raises(VerbsError, match="rdma_get_devices"):
        thread.call(fail)
    assert thread.call(lambda: 1) == 1


def test_a_job_is_dropped_where_nothing_was_opened_yet(thread: DeviceThread) -> None:
    thread.submit(lambda: pytest.fail("it was called"))
    assert not thread.running


def test_a_job_is_done_by_the_thread(thread: DeviceThread) -> None:
    done = threading.Event()
    thread.call(lambda: None)
    thread.submit(done.set)
    assert done.wait(10)


def test_in_a_forked_child_calls_are_the_callers_own(
    thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.call(lambda: None)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert not thread.running
    assert thread.call(threading.get_ident) == threading.get_ident()


def test_where_there_can_be_no_thread_calls_are_the_callers_own(
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
def test_what_the_kernel_tells_of_rdma_devices(messages: list[bytes], expected: bool) -> None:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, kernels:
        ours.setblocking(False)
        for message in messages:
            kernels.send(message)
        assert has_changes(ours) is expected
        assert has_changes(ours) is False


def test_what_was_lost_may_have_been_about_them() -> None:
    def recv(size: int) -> bytes:
        raise OSError(errno.ENOBUFS, "too slow")

    lossy: Any = SimpleNamespace(recv=recv)
    assert has_changes(lossy)


def test_a_sandbox_without_uevents(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(socket, "socket", refuse)
    assert open_uevents() is None


def test_a_change_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
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
