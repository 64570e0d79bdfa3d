"""The resolution of names to addresses."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from aiordma import AddressError
from aiordma.cm.resolving import is_loopback, resolve_host
from aiordma.loop import blocking_pool, running_loop
from aiordma.rdmacm import SocketAddress, parse_address

pytestmark = pytest.mark.asyncio


async def resolve(host: str | None, port: int = 7471) -> list[SocketAddress]:
    return await resolve_host(running_loop(), host, port)


def forbid_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the resolver was asked")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def found_v4(host: str) -> tuple[object, ...]:
    return (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 7471))


def found_v6(host: str, scope_id: int = 0) -> tuple[object, ...]:
    return (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (host, 7471, 0, scope_id))


@pytest.mark.parametrize("host", ["10.7.1.1", "::1", "2001:db8::5", "fe80::1%lo"])
async def test_a_numeric_host_is_its_own_address(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_resolver(monkeypatch)
    assert await resolve(host) == [parse_address(host, 7471)]


@pytest.mark.parametrize("host", [None, ""])
async def test_no_host_is_the_wildcard_address_of_both_families(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_resolver(monkeypatch)
    assert await resolve(host, 0) == [parse_address("::", 0), parse_address("0.0.0.0", 0)]


async def test_a_name_is_looked_up() -> None:
    found = await resolve("localhost")
    assert found
    assert all(is_loopback(address) for address in found)
    assert {address.port for address in found} == {7471}
    assert len(set(found)) == len(found)


async def test_a_name_is_looked_up_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def look_up(host: str, port: int, **kwargs: object) -> list[tuple[object, ...]]:
        threads.append(threading.current_thread())
        return [found_v4("10.7.1.1"), found_v6("2001:db8::5")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert await resolve("storage") == [
        SocketAddress("10.7.1.1", 7471),
        SocketAddress("2001:db8::5", 7471, socket.AF_INET6),
    ]
    assert len(threads) == 1
    assert threads != [threading.current_thread()]


async def test_a_name_is_looked_up_in_the_blocking_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocking_jobs: list[object] = []
    submit = blocking_pool.submit

    def record(job: Callable[[], None]) -> None:
        blocking_jobs.append(job)
        submit(job)

    monkeypatch.setattr(blocking_pool, "submit", record)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [found_v4("10.7.1.1")])
    assert await resolve("storage") == [SocketAddress("10.7.1.1", 7471)]
    assert len(blocking_jobs) == 1


async def test_an_address_that_is_found_twice_is_returned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = [found_v4("10.7.1.1"), found_v6("fe80::1", 1), found_v4("10.7.1.1")]
    answer += [found_v6("fe80::1", 2), found_v6("fe80::1", 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)
    assert await resolve("storage") == [
        SocketAddress("10.7.1.1", 7471),
        SocketAddress("fe80::1", 7471, socket.AF_INET6, 1),
        SocketAddress("fe80::1", 7471, socket.AF_INET6, 2),
    ]


async def test_an_address_of_another_family_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    vsock = (socket.AF_VSOCK, socket.SOCK_STREAM, 0, "", (2, 7471))
    answer = [vsock, found_v4("10.7.1.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)
    assert await resolve("storage") == [SocketAddress("10.7.1.1", 7471)]


@pytest.mark.parametrize("host", ["a" * 300, "..", "fe80::1%nonesuch0", f"fe80::1%{2**32}"])
async def test_an_invalid_name_is_an_address_error(host: str) -> None:
    with pytest.raises(AddressError, match="cannot be resolved"):
        await resolve(host)


async def test_an_unknown_name_is_an_address_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        AddressError, match=r"'nonesuch' cannot be resolved: .* not known"
    ) as caught:
        await resolve("nonesuch")
    assert isinstance(caught.value.__cause__, socket.gaierror)


@pytest.mark.parametrize("host", ["10.7.1.1", "::1", "localhost", "", None])
@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_out_of_range_is_a_value_error(
    host: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_resolver(monkeypatch)
    with pytest.raises(ValueError, match=f"port {port} is not between"):
        await resolve(host, port)


async def test_a_scope_is_kept() -> None:
    (found,) = await resolve("fe80::1%lo")
    assert found.scope_id == socket.if_nametoindex("lo")


async def test_the_scope_of_a_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [found_v6("fe80::1", 1), found_v6("fe80::2%lo", 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)
    assert await resolve("neighbour") == [
        SocketAddress("fe80::1", 7471, socket.AF_INET6, 1),
        SocketAddress("fe80::2", 7471, socket.AF_INET6, 1),
    ]


async def test_cancelling_does_not_wait_for_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def look_up(*args: object, **kwargs: object) -> list[tuple[object, ...]]:
        begun.set()
        gate.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    task = asyncio.create_task(resolve("storage"))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.7.1.1", False), ("::", False)],
)
async def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(parse_address(host)) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
async def test_every_form_of_a_loopback_address_is_recognised(host: str) -> None:
    assert is_loopback(parse_address(host))


async def test_other_addresses_are_no_loopback() -> None:
    assert not any(is_loopback(parse_address(host)) for host in ("10.7.1.1", "fd07:1::1", "::"))
