"""The connect steps of a ping, and its server, without a device."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from aiordma import ConnectError, Connection, DeviceRemoved, RouteError, Unreachable
from aiordma.enums import TransportType
from aiordma.loop import Loop
from aiordma.ping import client, server
from aiordma.ping.client import timed_connect
from aiordma.ping.handshake import announced_size
from aiordma.ping.options import PingOptions
from aiordma.rdmacm import DeviceAddress, SocketAddress, parse_address

pytestmark = pytest.mark.asyncio

NAMES = {"both": ["2001:db8::2", "10.7.1.2"], "here": ["10.7.1.1"]}


class FakeId:
    """Replace AsyncCmId and the resolver, and record the calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.never_answers = False
        self.private_data = b""
        monkeypatch.setattr(client, "resolve_host", self._resolve)
        monkeypatch.setattr(client, "AsyncCmId", SimpleNamespace(create=self._create))
        monkeypatch.setattr(Connection, "from_id", self._from_id)

    async def _resolve(self, _: Loop, host: str, port: int) -> list[SocketAddress]:
        return [parse_address(numeric, port) for numeric in NAMES.get(host, [host])]

    async def _create(self) -> FakeId:
        return self

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.failures:
            raise self.failures[name]

    @asynccontextmanager
    async def closed_on_failure(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            self.steps.append("close")
            raise

    def bind_addr(self, source: SocketAddress) -> None:
        self._step(f"from {source.host}")

    async def resolve_addr(self, destination: SocketAddress, *, timeout: float) -> None:
        self._step(f"address {destination.host} {timeout:g}")

    async def resolve_route(self, *, timeout: float) -> None:
        self._step(f"route {timeout:g}")

    def device(self) -> object:
        return SimpleNamespace(name="rxe0", transport=TransportType.IB)

    async def _from_id(self, _: FakeId, *, private_data: bytes, options: object) -> object:
        self._step("connect")
        self.private_data = private_data
        if self.never_answers:
            await asyncio.Event().wait()
        return SimpleNamespace(local_address=("10.7.1.1", 4711), peer_address=("10.7.1.2", 7473))


@pytest.fixture
def fake_id(monkeypatch: pytest.MonkeyPatch) -> FakeId:
    return FakeId(monkeypatch)


async def test_each_connect_step_is_timed(fake_id: FakeId) -> None:
    timed = await timed_connect(PingOptions("10.7.1.2", size=100, wait=3))
    assert fake_id.steps == ["address 10.7.1.2 3", "route 3", "connect"]
    assert announced_size(fake_id.private_data) == 100
    assert timed.device == "rxe0 (IB)"
    assert str(timed).startswith("rxe0 (IB) at 10.7.1.1 to 10.7.1.2 port 7473: address 0.")


async def test_the_addresses_of_a_name_are_tried_in_order(fake_id: FakeId) -> None:
    fake_id.failures["address 2001:db8::2 5"] = RouteError("no route")
    await timed_connect(PingOptions("both"))
    assert fake_id.steps == [
        "address 2001:db8::2 5",
        "close",
        "address 10.7.1.2 5",
        "route 5",
        "connect",
    ]


async def test_only_addresses_of_the_chosen_family_are_tried(fake_id: FakeId) -> None:
    await timed_connect(PingOptions("both", family=socket.AF_INET))
    assert fake_id.steps[0] == "address 10.7.1.2 5"


async def test_only_addresses_of_the_family_of_the_source_are_tried(fake_id: FakeId) -> None:
    await timed_connect(PingOptions("both", source="here"))
    assert fake_id.steps[:2] == ["from 10.7.1.1", "address 10.7.1.2 5"]
    with pytest.raises(ConnectError, match="no address of the local address's family"):
        await timed_connect(PingOptions("2001:db8::2", source="here"))


async def test_a_host_without_an_address_of_the_family(fake_id: FakeId) -> None:
    with pytest.raises(ConnectError, match=r"10\.7\.1\.2 has no IPv6 address"):
        await timed_connect(PingOptions("10.7.1.2", family=socket.AF_INET6))


async def test_a_peer_that_does_not_answer_in_time(fake_id: FakeId) -> None:
    fake_id.never_answers = True
    with pytest.raises(Unreachable, match=r"10\.7\.1\.2 port 9 does not answer"):
        await timed_connect(PingOptions("10.7.1.2", 9, wait=0.01))


class FakeListener:
    """A listener without connection requests. `end`: the exception that ends it."""

    def __init__(self, end: Exception | None = None) -> None:
        self.end = end
        self.local_address = ("10.7.1.1", 4711)
        self.closed = False

    def __aiter__(self) -> FakeListener:
        return self

    async def __anext__(self) -> object:
        if self.end is None:
            await asyncio.Event().wait()
        raise self.end or StopAsyncIteration

    async def __aenter__(self) -> FakeListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True


RXE = DeviceAddress("10.7.1.1", "eth0", "rxe0", TransportType.IB)
LINK_LOCAL = DeviceAddress("fe80::1%eth0", "eth0", "rxe0", TransportType.IB)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        (None, "fe80::1%eth0 (rxe0), 10.7.1.1 (rxe0)"),
        ("10.7.1.1", "10.7.1.1 (rxe0)"),
        ("0.0.0.0", "10.7.1.1 (rxe0)"),
        ("::", "fe80::1%eth0 (rxe0)"),
        ("10.9.9.9", "10.9.9.9"),
    ],
)
async def test_the_server_prints_its_addresses(
    host: str | None, addresses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = FakeListener(DeviceRemoved("the RDMA device was removed"))
    listener.local_address = (host or "::", 4711)
    monkeypatch.setattr(server, "device_addresses", lambda: [LINK_LOCAL, RXE])
    monkeypatch.setattr(server, "listen_for_connections", lambda *_: listener)
    printed: list[str] = []
    with pytest.raises(DeviceRemoved):  # not an ExceptionGroup
        await server.listen(host, 0, printed.append)
    assert printed == [f"listening on port 4711 at {addresses}; Ctrl-C ends it"]
    assert listener.closed


async def test_the_first_address_is_link_local_only_if_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "device_addresses", lambda: [LINK_LOCAL, RXE])
    assert await server.first_address(None) == RXE
    assert await server.first_address(socket.AF_INET6) == LINK_LOCAL


@pytest.mark.parametrize("failure", [None, ConnectError("no")])
async def test_the_local_server_is_closed_when_its_block_ends(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = FakeListener()
    monkeypatch.setattr(server, "listen_for_connections", lambda *_: listener)
    raised: Exception | None = None
    try:
        async with server.local_server("10.7.1.1") as port:
            assert port == 4711
            if failure is not None:
                raise failure
    except ConnectError as error:
        raised = error
    assert raised is failure
    assert listener.closed
    assert len(asyncio.all_tasks()) == 1
