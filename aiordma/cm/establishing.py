"""Establishing: ids with the address of a peer, and listening ids, for connections and streams."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.async_id import create_id
from aiordma.cm.resolving import is_loopback, resolve_host, try_addresses
from aiordma.dispatch import CmDispatcher
from aiordma.enums import IdOption
from aiordma.errors import AddressError, VerbsError
from aiordma.loop import running_loop
from aiordma.options import ConnectionOptions
from aiordma.rdmacm import SocketAddress, interface_addresses

PORT_ATTEMPTS = 10

T = TypeVar("T")


async def establish(
    host: str,
    port: int,
    local_address: tuple[str, int] | None,
    options: ConnectionOptions,
    finish: Callable[[AsyncCmId], Awaitable[T]],
) -> T:
    """Resolve an address, and return the result of `finish` for the new id.

    The addresses of `host` are tried in order, until `finish` succeeds for one of them. `finish`
    resolves the route, connects, and owns the id from then on. Raises: as aiordma.connect().
    """
    loop = running_loop()
    sources = [] if local_address is None else await resolve_host(loop, *local_address)
    found = await resolve_host(loop, host, port)
    source_of = {own.family: own for own in reversed(sources)}

    async def attempt(address: SocketAddress) -> T:
        dispatcher = await CmDispatcher.of(loop)
        dispatcher.acquire()
        try:
            turns = dispatcher.connect_turns
            turn = await turns.begin()
            source = source_of.get(address.family)
            attempts = 1 if source is not None and source.port else PORT_ATTEMPTS
            try:
                while True:
                    attempts -= 1
                    try:
                        cm = create_id(dispatcher, options.port_space)
                        await _resolve(cm, address, source, options)
                        return await finish(cm)
                    except VerbsError as error:
                        # On iWARP, rdma_cm has chosen a port that a TCP socket uses.
                        if error.errno != errno.EADDRINUSE or not attempts:
                            raise
            finally:
                turns.end(turn)
        finally:
            dispatcher.release()

    return await try_addresses(
        [address for address in found if not sources or address.family in source_of],
        attempt,
        (host, port),
    )


async def _resolve(
    cm: AsyncCmId,
    destination: SocketAddress,
    source: SocketAddress | None,
    options: ConnectionOptions,
) -> None:
    try:
        _set_options(cm, options)
        if source is not None:
            cm.bind_addr(source)
        await cm.resolve_addr(destination, timeout=options.resolve_timeout)
    except BaseException as error:
        await close_after(cm, error)
        raise


def _set_options(cm: AsyncCmId, options: ConnectionOptions) -> None:
    if options.tos is not None:
        cm.set_option(IdOption.TOS, options.tos)
    if options.reuse_address:
        cm.set_option(IdOption.REUSEADDR, 1)


async def create_listening_ids(
    host: str | None, port: int, backlog: int, options: ConnectionOptions
) -> list[AsyncCmId]:
    """Make ids that listen, all on one port, and return them.

    There are two ids (IPv4 and IPv6) if `host` means all addresses and this machine has both
    families. Otherwise there is one id, for the first address of `host` that can be listened on.

    Raises: as aiordma.listen().
    """
    addresses = await resolve_host(running_loop(), host, port)
    if not host:
        return await _listen_on_all(addresses, backlog, options)
    for address in addresses[:-1]:
        with suppress(VerbsError, AddressError):
            return [await _listen_at(address, backlog, options)]
    return [await _listen_at(addresses[-1], backlog, options)]


async def _listen_on_all(
    addresses: list[SocketAddress], backlog: int, options: ConnectionOptions
) -> list[AsyncCmId]:
    """Make an id for each address family that this machine has, all on one port."""
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
            # A port that is free in one family can be in use in the other: try another port.
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
            "the network too; use an address from `python -m aiordma devices`, or None for all"
        )
    cm = await AsyncCmId.create(options.port_space)
    try:
        _set_options(cm, options)
        if address.host == "::":
            cm.set_option(IdOption.AFONLY, 1)
        cm.bind_addr(address)
        cm.listen(backlog)
    except VerbsError:
        await cm.aclose()  # so that the port is free again when the error is raised
        raise
    except BaseException:
        cm.abort()
        raise
    return cm
