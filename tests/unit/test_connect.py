"""connect() and listen(): the addresses that are tried, and the errors when none works."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field
from typing import Any

import pytest

import aiordma
from aiordma import (
    AddressError,
    ConnectError,
    Connection,
    ConnectionOptions,
    Rejected,
    Unreachable,
    VerbsError,
)
from aiordma.cm import AsyncCmId, establishing
from aiordma.loop import Loop
from aiordma.rdmacm import SocketAddress, parse_address

pytestmark = pytest.mark.asyncio


HOSTS = {
    "storage": ["2001:db8::5", "10.7.1.5", "10.7.1.6"],
    "v6": ["2001:db8::5"],
    "localhost": ["::1", "127.0.0.1"],
    "both": ["2001:db8::1", "10.7.1.1", "10.7.1.2"],
}


class Attempts:
    """Replaces the attempts to connect to an address. `failures` are the failures by host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str | None]] = []
        self.failures: dict[str, Exception] = {}
        monkeypatch.setattr(establishing, "resolve_host", self._resolve_host)
        monkeypatch.setattr(establishing, "_resolve", self._resolve)
        monkeypatch.setattr(Connection, "from_id", self._from_id)

    async def _resolve_host(self, loop: Loop, host: str, port: int) -> list[SocketAddress]:
        hosts = HOSTS.get(host, ["::", "0.0.0.0"] if not host else [host])
        return [parse_address(numeric, port) for numeric in hosts]

    async def _resolve(
        self, destination: SocketAddress, source: SocketAddress | None, _: ConnectionOptions
    ) -> str:
        self.made.append((destination.host, source.host if source else None))
        return destination.host

    async def _from_id(self, cm: str, **_: object) -> str:
        if cm in self.failures:
            raise self.failures[cm]
        return f"connection to {cm}"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(monkeypatch)


async def test_connect_uses_the_first_address_that_works(attempts: Attempts) -> None:
    attempts.failures = {"2001:db8::5": AddressError("no RDMA path")}
    connection: object = await aiordma.connect("storage", 7471)
    assert connection == "connection to 10.7.1.5"
    assert attempts.made == [("2001:db8::5", None), ("10.7.1.5", None)]


async def test_when_no_address_works_the_last_failure_is_raised(attempts: Attempts) -> None:
    attempts.failures = {
        "2001:db8::5": AddressError("no RDMA path"),
        "10.7.1.5": Unreachable("no answer"),
        "10.7.1.6": Rejected("refused", 28),
    }
    with pytest.raises(Rejected, match="refused") as caught:
        await aiordma.connect("storage", 7471)
    assert caught.value.__notes__ == [
        "tried before: no RDMA path",
        "tried before: no answer",
    ]


async def test_after_a_local_error_no_other_address_is_tried(attempts: Attempts) -> None:
    attempts.failures = {"2001:db8::5": VerbsError(errno.ENOMEM, "ibv_reg_mr")}
    with pytest.raises(VerbsError, match="RLIMIT_MEMLOCK"):
        await aiordma.connect("storage", 7471)
    assert len(attempts.made) == 1


async def test_only_addresses_in_the_family_of_the_local_address_are_tried(
    attempts: Attempts,
) -> None:
    assert await aiordma.connect("storage", 7471, local_address=("10.7.1.1", 0))
    assert attempts.made == [("10.7.1.5", "10.7.1.1")]


async def test_no_address_in_the_family_of_the_local_address_is_an_error(
    attempts: Attempts,
) -> None:
    with pytest.raises(ConnectError, match=r"v6:7471 has no address of the local address's family"):
        await aiordma.connect("v6", 7471, local_address=("10.7.1.1", 0))
    assert attempts.made == []


async def test_a_wildcard_local_address_fits_both_families(attempts: Attempts) -> None:
    assert await aiordma.connect("10.7.1.5", 7471, local_address=("", 4711))
    assert await aiordma.connect("v6", 7471, local_address=("", 4711))
    assert attempts.made == [("10.7.1.5", "0.0.0.0"), ("2001:db8::5", "::")]


async def test_each_address_is_tried_from_a_local_address_of_its_family(
    attempts: Attempts,
) -> None:
    attempts.failures = {"2001:db8::5": AddressError("no"), "10.7.1.5": AddressError("no")}
    assert await aiordma.connect("storage", 7471, local_address=("both", 0))
    assert attempts.made == [
        ("2001:db8::5", "2001:db8::1"),
        ("10.7.1.5", "10.7.1.1"),
        ("10.7.1.6", "10.7.1.1"),
    ]


async def test_connect_refuses_shared_receives(attempts: Attempts) -> None:
    options = ConnectionOptions(shared_recv_depth=1)
    with pytest.raises(ValueError, match="shared_recv_depth is for listen"):
        await aiordma.connect("storage", 7471, options=options)
    assert attempts.made == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_listening_on_loopback_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="RDMA has no loopback"):
        await aiordma.listen(host, 0)


@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="not between 0 and 65535"):
        await aiordma.listen("10.7.1.1", port)
    with pytest.raises(ValueError, match="not between 0 and 65535"):
        await aiordma.connect("10.7.1.1", port)


# --- listening on all addresses ---


@dataclass
class FakeListeningId:
    """An id that listens, with the attributes that `_listen_on_all` uses."""

    local_address: tuple[str, int]
    aborted: bool = False
    closed: bool = False

    def abort(self) -> None:
        self.aborted = True

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed = True

    @property
    def ended(self) -> bool:
        return self.aborted or self.closed


@dataclass
class Machine:
    """Replaces `_listen_at`. `failures` are the exceptions by host and port."""

    families: list[str] = field(default_factory=lambda: ["::1", "127.0.0.1"])
    free_ports: list[int] = field(default_factory=lambda: list(range(40001, 40100)))
    failures: dict[tuple[str, int], BaseException] = field(default_factory=dict)
    made: list[FakeListeningId] = field(default_factory=list)

    def interface_addresses(self) -> list[tuple[str, SocketAddress]]:
        return [("eth0", parse_address(host)) for host in self.families]

    async def listen_at(self, address: SocketAddress, *rest: Any) -> FakeListeningId:
        await asyncio.sleep(0)
        assert all(cm.closed for cm in self.made if cm.local_address[0] == address.host)
        port = address.port or self.free_ports.pop(0)
        if (address.host, port) in self.failures:
            raise self.failures[address.host, port]
        self.made.append(FakeListeningId((address.host, port)))
        return self.made[-1]

    async def listen_on_all(self, port: int) -> list[tuple[str, int]]:
        addresses = [parse_address("::", port), parse_address("0.0.0.0", port)]
        options = aiordma.ConnectionOptions()
        cms = await establishing._listen_on_all(addresses, 0, options)
        listening: list[object] = [cm for cm in self.made if not cm.ended]
        assert listening == cms
        return [cm.local_address for cm in cms]

    @property
    def open_addresses(self) -> list[tuple[str, int]]:
        return [cm.local_address for cm in self.made if not cm.ended]

    @property
    def closed(self) -> list[tuple[str, int]]:
        return [cm.local_address for cm in self.made if cm.closed]


IN_USE = VerbsError(errno.EADDRINUSE, "rdma_bind_addr")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(establishing, "_listen_at", made.listen_at)
    monkeypatch.setattr(establishing, "interface_addresses", made.interface_addresses)
    return made


async def test_listening_on_all_addresses_uses_one_port_in_both_families(machine: Machine) -> None:
    assert await machine.listen_on_all(0) == [("::", 40001), ("0.0.0.0", 40001)]
    machine.made.clear()
    assert await machine.listen_on_all(7471) == [("::", 7471), ("0.0.0.0", 7471)]


@pytest.mark.parametrize(("own", "host"), [("::1", "::"), ("10.7.1.1", "0.0.0.0")])
async def test_a_family_without_addresses_is_skipped(machine: Machine, own: str, host: str) -> None:
    machine.families = [own, own]
    assert await machine.listen_on_all(7471) == [(host, 7471)]


async def test_a_port_that_is_free_in_one_family_only_is_not_used(machine: Machine) -> None:
    machine.failures = {("0.0.0.0", 40001): IN_USE, ("0.0.0.0", 40002): IN_USE}
    assert await machine.listen_on_all(0) == [("::", 40003), ("0.0.0.0", 40003)]
    assert machine.closed == [("::", 40001), ("::", 40002)]


async def test_the_search_for_a_port_ends(machine: Machine) -> None:
    machine.failures = {("0.0.0.0", port): IN_USE for port in machine.free_ports}
    with pytest.raises(VerbsError, match="port is in use"):
        await machine.listen_on_all(0)
    assert len(machine.made) == len(machine.closed) == establishing.PORT_ATTEMPTS
    assert machine.open_addresses == []


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
async def test_a_given_port_is_tried_once(machine: Machine, host: str) -> None:
    machine.failures = {(host, 7471): IN_USE}
    with pytest.raises(VerbsError, match="port is in use"):
        await machine.listen_on_all(7471)
    assert len(machine.made) == len(machine.closed) == (host == "0.0.0.0")
    assert machine.open_addresses == []


async def test_a_failure_of_the_first_address_is_not_retried(machine: Machine) -> None:
    machine.failures = {("::", 40001): VerbsError(errno.ENODEV, "rdma_create_event_channel")}
    with pytest.raises(VerbsError, match="no RDMA device"):
        await machine.listen_on_all(0)
    assert machine.made == []


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ZeroDivisionError()])
async def test_other_exceptions_are_not_retried(machine: Machine, error: BaseException) -> None:
    machine.failures = {("0.0.0.0", 40001): error}
    with pytest.raises(type(error)):
        await machine.listen_on_all(0)
    assert [(cm.aborted, cm.closed) for cm in machine.made] == [(True, False)]
    assert machine.open_addresses == []


@pytest.mark.parametrize(
    ("error", "calls"),
    [(IN_USE, ["aclose"]), (asyncio.CancelledError(), ["abort"]), (ZeroDivisionError(), ["abort"])],
)
async def test_a_failed_bind_is_raised_after_the_id_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, calls: list[str]
) -> None:
    made: list[str] = []

    class Id:
        def bind_addr(self, address: SocketAddress) -> None:
            raise error

        async def aclose(self) -> None:
            await asyncio.sleep(0)
            made.append("aclose")

        def abort(self) -> None:
            made.append("abort")

    async def create(port_space: object) -> Id:
        return Id()

    monkeypatch.setattr(AsyncCmId, "create", create)
    with pytest.raises(type(error)):
        await aiordma.listen("10.7.1.1", 7471)
    assert made == calls


async def test_a_machine_without_addresses_listens_on_all_ipv4_addresses(
    machine: Machine,
) -> None:
    machine.families = []
    assert await machine.listen_on_all(7471) == [("0.0.0.0", 7471)]


async def test_a_machine_without_addresses_and_devices_raises_a_hint(machine: Machine) -> None:
    machine.families = []
    machine.failures = {("0.0.0.0", 7471): VerbsError(errno.ENODEV, "rdma_create_event_channel")}
    with pytest.raises(VerbsError, match="no RDMA device"):
        await aiordma.listen(None, 7471)
