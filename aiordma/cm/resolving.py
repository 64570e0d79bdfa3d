"""Names to addresses, in a worker thread."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiordma import rdmacm
from aiordma.errors import AddressError, ConnectError
from aiordma.loop import Loop, blocking_pool, run_in_worker, running_loop
from aiordma.rdmacm import AddrInfo, SocketAddress, parse_address
from aiordma.rdmacm.address import format_address

T = TypeVar("T")


async def resolve_host(loop: Loop, host: str | None, port: int) -> list[SocketAddress]:
    """The addresses of a host: its own if it is numeric, else those the system's resolver gives.

    Without a host (`None` or ""): every address of this machine, of both families where it can be.
    See getaddrinfo(3). Cancelling leaves the resolver to finish in its thread.

    Raises:
        AddressError: the name is not known.
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


async def try_addresses(
    candidates: list[SocketAddress],
    attempt: Callable[[SocketAddress], Awaitable[T]],
    wanted: tuple[str, int],
) -> T:
    """What `attempt` makes of the first of the addresses for `wanted` with which it succeeds.

    Raises:
        ConnectError: of the last, with a note of each before it; or there is no candidate.
    """
    failures: list[ConnectError] = []
    for address in candidates:
        try:
            return await attempt(address)
        except ConnectError as error:
            failures.append(error)
    if not failures:
        text = f"{format_address(wanted)} has no address of the local address's family"
        raise ConnectError(text)
    last = failures.pop()
    for earlier in failures:
        last.add_note(f"tried before: {earlier}")
    raise last


async def getaddrinfo(
    node: str | None, service: str | int | None = None, hints: AddrInfo | None = None
) -> list[AddrInfo]:
    """What a name and a port stand for, as RDMA has it: rdma_getaddrinfo(3), in a worker thread.

    `node` is a name or an address; None, with the flag PASSIVE, is any of this machine. `hints`
    narrow the search, see AddrInfo. librdmacm gives the first address only. SyncCmId.create_ep
    takes the result.

    Cancelling leaves the resolver to finish in its thread.

    Raises:
        AddressError: the name or the service is not known.
        VerbsError: ENODEV (no RDMA device), ENOMEM.
        ValueError: neither node, nor service, nor an address in the hints was given.
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
    """Whether it is 127.0.0.0/8 or ::1, which no RDMA device has."""
    parsed = ipaddress.ip_address(address.host)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
