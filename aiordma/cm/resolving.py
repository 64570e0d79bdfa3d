"""The resolution of names to addresses, in a worker thread."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Coroutine
from typing import TypeVar

from aiordma import rdmacm
from aiordma.errors import AddressError, ConnectError
from aiordma.loop import Loop, blocking_pool, run_in_worker, running_loop
from aiordma.rdmacm import AddrInfo, SocketAddress, parse_address
from aiordma.rdmacm.address import format_address

T = TypeVar("T")


async def resolve_host(loop: Loop, host: str | None, port: int) -> list[SocketAddress]:
    """Return the addresses of a host. A name is resolved by the system, a numeric host is parsed.

    Without a host (`None` or ""), return the wildcard addresses of IPv6 and IPv4. See
    getaddrinfo(3). If this is cancelled, the resolver still runs to its end in its thread.

    Raises:
        AddressError: the name is unknown.
        ValueError: the port is not between 0 and 65535.
    """
    if not host:
        return [parse_address("::", port), parse_address("0.0.0.0", port)]
    try:
        return [parse_address(host, port)]
    except ValueError:
        if not 0 <= port <= 65535:
            raise
    return await run_in_worker(loop, lambda: _look_up(host, port), blocking_pool.submit)


def try_addresses(
    candidates: list[SocketAddress],
    attempt: Callable[[SocketAddress], Coroutine[object, None, T]],
    destination: tuple[str, int],
) -> Coroutine[object, None, T]:
    """Await `attempt` with the addresses of `destination` until it succeeds. Return its result.

    Raises:
        ConnectError: the error of the last attempt, with a note for each earlier one; or there is
            no candidate.
    """
    if len(candidates) == 1:
        return attempt(candidates[0])
    return _try_in_order(candidates, attempt, destination)


async def _try_in_order(
    candidates: list[SocketAddress],
    attempt: Callable[[SocketAddress], Coroutine[object, None, T]],
    destination: tuple[str, int],
) -> T:
    failures: list[ConnectError] = []
    for address in candidates:
        try:
            return await attempt(address)
        except ConnectError as error:
            failures.append(error)
    if not failures:
        text = f"{format_address(destination)} has no address of the local address's family"
        raise ConnectError(text)
    last = failures.pop()
    for earlier in failures:
        last.add_note(f"tried before: {earlier}")
    raise last


async def getaddrinfo(
    node: str | None, service: str | int | None = None, hints: AddrInfo | None = None
) -> list[AddrInfo]:
    """Resolve a name and a port for RDMA: rdma_getaddrinfo(3), in a worker thread.

    `node` is a name or an address. None, with the flag PASSIVE, means any address of this machine.
    `hints` narrow the search, see AddrInfo. librdmacm returns the first address only.
    SyncCmId.create_ep takes the result.

    If this is cancelled, the resolver still runs to its end in its thread.

    Raises:
        AddressError: the name or the service is unknown.
        VerbsError: ENODEV (no RDMA device), ENOMEM.
        ValueError: no node, no service and no address in the hints was given.
    """
    return await run_in_worker(
        running_loop(), lambda: rdmacm.getaddrinfo(node, service, hints), blocking_pool.submit
    )


def _look_up(host: str, port: int) -> list[SocketAddress]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"the name {host!r} cannot be resolved: {error}") from error
    addresses = (
        SocketAddress(str(address[0]).partition("%")[0], port, family, _scope_id(address))
        for family, _, _, _, address in found
        if family in (socket.AF_INET, socket.AF_INET6)
    )
    return list(dict.fromkeys(addresses))


def _scope_id(address: tuple[object, ...]) -> int:
    scope = address[3] if len(address) == 4 else 0
    assert isinstance(scope, int)
    return scope


def is_loopback(address: SocketAddress) -> bool:
    """Return True for 127.0.0.0/8 and ::1, which no RDMA device has."""
    parsed = ipaddress.ip_address(address.host)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
