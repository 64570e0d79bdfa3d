"""Fakes of librdmacm's ids and channels, for tests of `aiordma.cm` without a device.

The loop, the worker threads and everything in `aiordma.cm` are real.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from aiordma.cm import AsyncCmId, CmState, SyncCmId
from aiordma.cm.handle import IdHandle
from aiordma.enums import CmEventType
from aiordma.loop import Loop
from aiordma.rdmacm import CmEvent, CmId, SocketAddress

PEER = SocketAddress("10.7.1.2", 7471)
HERE = SocketAddress("10.7.1.1", 4711)


@dataclass
class FakeDevice:
    is_iwarp: bool = False


@dataclass
class FakeQp:
    """A queue pair whose destruction fails if `failure` is set."""

    destroyed: bool = False
    failure: Exception | None = None

    def destroy(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.destroyed = True


@dataclass
class FakeOwnObjects:
    qp: FakeQp | None

    def destroy(self) -> None:
        if self.qp is not None:
            self.qp.destroy()


@dataclass
class FakeCmId:
    """A CmId that records its calls; `during["connect"]` is called instead of the C function."""

    address: int
    is_iwarp: bool = False
    calls: list[str] = field(default_factory=list)
    during: dict[str, Callable[[], object]] = field(default_factory=dict)
    local_address: SocketAddress | None = HERE
    peer_address: SocketAddress | None = PEER
    destroyed: threading.Event = field(default_factory=threading.Event)

    is_datagram: bool = False
    qp: FakeQp | None = None

    def own_objects(self) -> FakeOwnObjects:
        return FakeOwnObjects(self.qp)

    def device(self) -> FakeDevice:
        return FakeDevice(self.is_iwarp)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            self.calls.append(name)
            self.during.get(name, lambda: None)()
            if name == "destroy":
                self.destroyed.set()

        return call


class FakeOwnChannel:
    """An OwnChannel that counts its references, and returns the events that put() added."""

    def __init__(self) -> None:
        self.references = 1
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._events: list[CmEvent] = []

    def put(self, event: CmEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self.fd, 1)

    def get_events(self) -> list[CmEvent]:
        assert self.references
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        events, self._events = self._events, []
        return events

    def acquire(self) -> FakeOwnChannel:
        assert self.references
        self.references += 1
        return self

    def release(self) -> None:
        assert self.references
        self.references -= 1
        if not self.references:
            os.close(self.fd)


class FakeDispatcher:
    """A CmDispatcher that records the registered ids, and counts its users."""

    def __init__(self) -> None:
        self.handlers: dict[int, object] = {}
        self.users = 0

    def register(self, cm_id: FakeCmId, handler: AsyncCmId) -> None:
        self.users += 1
        self.handlers[cm_id.address] = None  # like the real one, it must keep no handler alive

    def migrate_id(self, cm_id: FakeCmId) -> None:
        cm_id.migrate(None)

    def watch(self, cm_id: FakeCmId, channel: FakeOwnChannel) -> Callable[[], None]:
        channel.acquire()
        return channel.release

    def forget(self, cm_id: FakeCmId) -> None:
        self.handlers.pop(cm_id.address, None)

    def release(self) -> None:
        self.users -= 1


class FakeCm:
    """A factory of ids and channels, and of the events for them."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.dispatcher = FakeDispatcher()
        self.ids: dict[int, FakeCmId] = {}
        self.channels: list[FakeOwnChannel] = []
        self._addresses = itertools.count(0x1000, 0x100)

    def raw_id(self, address: int | None = None) -> FakeCmId:
        made = FakeCmId(next(self._addresses) if address is None else address)
        self.ids[made.address] = made
        return made

    def open_channel(self) -> FakeOwnChannel:
        self.channels.append(FakeOwnChannel())
        return self.channels[-1]

    def make_id(self, state: CmState = CmState.IDLE, *, iwarp: bool = False) -> AsyncCmId:
        raw = self.raw_id()
        raw.is_iwarp = iwarp
        handle = IdHandle(self.loop, raw)  # type: ignore[arg-type]
        return AsyncCmId(handle, self.dispatcher, state, None)  # type: ignore[arg-type]

    def make_request(self, private_data: bytes = b"hello") -> AsyncCmId:
        raw = self.raw_id()
        request = CmEvent(CmEventType.CONNECT_REQUEST, raw.address, private_data=private_data)
        handle = IdHandle(self.loop, raw)  # type: ignore[arg-type]
        return AsyncCmId(handle, self.dispatcher, CmState.REQUESTED, request)  # type: ignore[arg-type]

    def request_event(self, private_data: bytes = b"hello") -> CmEvent:
        """Return a CONNECT_REQUEST for a listener, with a new id."""
        raw = self.raw_id()
        return CmEvent(CmEventType.CONNECT_REQUEST, raw.address, private_data=private_data)


def raw_of(cm: AsyncCmId | SyncCmId) -> FakeCmId:
    raw: object = cm.cm_id
    assert isinstance(raw, FakeCmId)
    return raw


def event(kind: CmEventType, status: int = 0, private_data: bytes = b"") -> CmEvent:
    return CmEvent(kind, 0, status=status, private_data=private_data)


@contextmanager
def fake_cm(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCm]:
    """Patch CmId.from_address() and OwnChannel, and yield the FakeCm that they use."""
    cm = FakeCm(loop)
    with monkeypatch.context() as patch:
        patch.setattr(CmId, "from_address", cm.ids.__getitem__)
        patch.setattr("aiordma.cm.handle.OwnChannel", cm.open_channel)
        yield cm
