"""connect() and listen()."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from aiordma.cm import AsyncCmId
from aiordma.connection import Connection
from aiordma.enums import IdOption
from aiordma.errors import AddressError, VerbsError
from aiordma.listener import Listener
from aiordma.loop import running_loop
from aiordma.opening import Opening
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions
from aiordma.rdmacm import SocketAddress, interface_addresses
from aiordma.resolve import first_that_answers, is_loopback, resolve_host

PORT_ATTEMPTS = 10


def connect(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> Opening[Connection]:
    """Connect to a listening peer: `await connect(...)` or `async with connect(...) as connection`.

    `host` is a name or an IPv4 or IPv6 address; the addresses of a name are tried in turn.
    `local_address` is where to connect from. `private_data` reaches the peer with the request: up
    to 56 bytes on InfiniBand and RoCE (padded with zeros to that), 251 on iWARP.

    Cancelling leaves nothing behind: what was begun is destroyed in the background.
    See rdma_resolve_addr(3), rdma_resolve_route(3), rdma_connect(3).

    Raises:
        AddressError: the name is unknown, or no RDMA device leads to the address.
        RouteError: no route was found.
        Rejected: nobody listens there, or the peer refused.
        Unreachable: nobody answered.
        VerbsError: no RDMA device, a local address that is taken, or not enough locked memory.
        ValueError: the private data is too long, or an option is more than the device can do.
    """
    return Opening(_connect(host, port, local_address, private_data, options))


async def _connect(
    host: str,
    port: int,
    local_address: tuple[str, int] | None,
    private_data: bytes,
    options: ConnectionOptions,
) -> Connection:
    if options.shared_recv_depth:
        raise ValueError("shared_recv_depth is for listen(): one connection shares with nobody")
    loop = running_loop()
    sources = [] if local_address is None else await resolve_host(loop, *local_address)
    found = await resolve_host(loop, host, port)
    source_of = {own.family: own for own in reversed(sources)}
    return await first_that_answers(
        [address for address in found if not sources or address.family in source_of],
        lambda address: _connect_to(address, source_of.get(address.family), private_data, options),
        (host, port),
    )


async def _connect_to(
    destination: SocketAddress,
    source: SocketAddress | None,
    private_data: bytes,
    options: ConnectionOptions,
) -> Connection:
    cm = await AsyncCmId.create(options.port_space)
    async with cm.closed_on_failure():
        _set_options(cm, options)
        if source is not None:
            cm.bind_addr(source)
        await cm.resolve_addr(destination, timeout=options.resolve_timeout)
        await cm.resolve_route(timeout=options.resolve_timeout)
    return await Connection.from_id(cm, private_data=private_data, options=options)


def _set_options(cm: AsyncCmId, options: ConnectionOptions) -> None:
    if options.tos is not None:
        cm.set_option(IdOption.TOS, options.tos)
    if options.reuse_address:
        cm.set_option(IdOption.REUSEADDR, 1)


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> Opening[Listener]:
    """Listen for peers: `await listen(...)` or `async with listen(...) as listener`.

    `host` is a name or address of this machine; None or "" stands for all of them, "::" for all
    IPv6 and "0.0.0.0" for all IPv4 addresses. Port 0 picks a free one: see
    `Listener.local_address`. At most `backlog` requests wait to be taken (0: 1024); those beyond
    are rejected. `options` are those of the connections that are accepted.

    A loopback address is refused: rdma_cm would take it for "all addresses" and let the network in.

    Cancelling leaves nothing behind. See rdma_bind_addr(3), rdma_listen(3).

    Raises:
        AddressError: the name is unknown, or the address is a loopback one.
        VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is taken or the address is not this
            machine's; ENODEV when there is no RDMA device.
    """
    return Opening(_listen(host, port, backlog, options))


async def _listen(
    host: str | None, port: int, backlog: int, options: ConnectionOptions
) -> Listener:
    addresses = await resolve_host(running_loop(), host, port)
    if not host:
        return Listener(await _listen_on_all(addresses, backlog, options), options)
    for address in addresses[:-1]:
        with suppress(VerbsError, AddressError):
            return Listener([await _listen_at(address, backlog, options)], options)
    return Listener([await _listen_at(addresses[-1], backlog, options)], options)


async def _listen_on_all(
    addresses: list[SocketAddress], backlog: int, options: ConnectionOptions
) -> list[AsyncCmId]:
    """An id for each address family that this machine has, all on one port."""
    present = {own.family for _, own in interface_addresses()}
    wanted = [address for address in addresses if address.family in present] or addresses[-1:]
    for attempt in range(PORT_ATTEMPTS):
        cms: list[AsyncCmId] = []
        try:
            for address in wanted:
                port = cms[0].local_address[1] if cms else address.port
                cms.append(await _listen_at(replace(address, port=port), backlog, options))
        except VerbsError:
            retry = cms and not addresses[0].port and attempt < PORT_ATTEMPTS - 1
            for cm in cms:
                cm.abort()
            for cm in cms:
                await cm.aclose()
            # A port that was free in one family need not be in the other: try another one.
            if not retry:
                raise
        except BaseException:
            for cm in cms:
                cm.abort()
            raise
        else:
            return cms
    raise AssertionError("the last attempt returns or raises")


async def _listen_at(address: SocketAddress, backlog: int, options: ConnectionOptions) -> AsyncCmId:
    if is_loopback(address):
        raise AddressError(
            f"cannot listen on {address.host}: RDMA has no loopback, and rdma_cm would accept from "
            "the network too; take an address from `python -m aiordma devices`, or None for all"
        )
    cm = await AsyncCmId.create(options.port_space)
    try:
        _set_options(cm, options)
        if address.host == "::":
            cm.set_option(IdOption.AFONLY, 1)
        cm.bind_addr(address)
        cm.listen(backlog)
    except VerbsError:
        await cm.aclose()  # the port is free again when the error arrives
        raise
    except BaseException:
        cm.abort()
        raise
    return cm
