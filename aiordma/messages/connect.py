"""connect() and listen(): make connections, and listeners for them."""

from __future__ import annotations

from collections.abc import Awaitable

from aiordma.cm import AsyncCmId
from aiordma.cm.establishing import create_listening_ids, establish
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.messages.connection import Connection, connect_id
from aiordma.messages.listener import Listener
from aiordma.options import DEFAULT_LIMITS, DEFAULT_OPTIONS, ConnectionOptions, ListenerLimits


def connect(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[Connection]:
    """Connect to a listening peer: `await connect(...)` or `async with connect(...) as connection`.

    See rdma_resolve_addr(3), rdma_resolve_route(3), rdma_connect(3).

    Any number of tasks can connect together. 32 of them have a turn at a time. A task gives up its
    turn when it has waited for its peer for 2 s.

    Cancelling leaves nothing behind on this side: everything is destroyed in the background. A
    listener can still see the request of a peer that gave up.

    Args:
        host: A host name, or an IPv4 or IPv6 address. The addresses of a name are tried one after
            another.
        port: The port of the listener.
        local_address: `(host, port)` of this side. None: any.
        private_data: Bytes that the peer gets with the request: up to 56 bytes on InfiniBand and
            RoCE, which pad them with zeros to 56, and up to 251 bytes on iWARP.
        options: The options of the connection.

    Raises:
        AddressError: the name is unknown, or no RDMA device leads to the address.
        RouteError: no route to the address was found.
        Rejected: no listener has the port, or the peer refused.
        Unreachable: the peer's machine did not answer.
        DeviceRemoved: the RDMA device was removed meanwhile.
        VerbsError: there is no RDMA device, the local address is in use, or the locked-memory limit
            is too low.
        ValueError: the private data is too long, or the device does not allow an option.
    """
    if options.shared_recv_depth:
        raise ValueError("shared_recv_depth is for listen(), not for a single connection")

    def finish(cm: AsyncCmId) -> Awaitable[Connection]:
        return connect_id(cm, private_data, options)

    return AwaitableContextManager(establish(host, port, local_address, options, finish))


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[Listener]:
    """Listen for peers: `await listen(...)` or `async with listen(...) as listener`.

    A loopback address is refused, because rdma_cm would treat it as "all addresses" and accept
    peers from the network. See rdma_bind_addr(3), rdma_listen(3).

    Cancelling leaves nothing behind: the port is free.

    Args:
        host: A name or an address of this machine. None or "" means all addresses, "::" all IPv6
            addresses, and "0.0.0.0" all IPv4 addresses.
        port: The port. 0 selects a free one: see `Listener.local_address`.
        backlog: The number of connection requests that can wait to be taken. When it is reached,
            the host with the most requests has its newest one rejected. 0 means 1024.
        limits: The limits on handshakes and connections.
        options: The options of the connections that the listener accepts.

    Raises:
        AddressError: the name is unknown, or the address is a loopback address.
        VerbsError: EADDRINUSE or EADDRNOTAVAIL when the port is in use, or this machine does not
            have the address; ENODEV when there is no RDMA device.
    """
    return AwaitableContextManager(_listen(host, port, backlog, limits, options))


async def _listen(
    host: str | None, port: int, backlog: int, limits: ListenerLimits, options: ConnectionOptions
) -> Listener:
    return Listener(await create_listening_ids(host, port, backlog, options), options, limits)
