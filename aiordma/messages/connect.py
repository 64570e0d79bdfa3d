"""connect() and listen()."""

from __future__ import annotations

from aiordma.cm import AsyncCmId
from aiordma.cm.establishing import create_listening_ids, establish
from aiordma.loop.context_managers import AwaitableContextManager
from aiordma.messages.connection import Connection
from aiordma.messages.listener import Listener
from aiordma.options import DEFAULT_OPTIONS, ConnectionOptions


def connect(
    host: str,
    port: int,
    *,
    local_address: tuple[str, int] | None = None,
    private_data: bytes = b"",
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[Connection]:
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
    return AwaitableContextManager(_connect(host, port, local_address, private_data, options))


async def _connect(
    host: str,
    port: int,
    local_address: tuple[str, int] | None,
    private_data: bytes,
    options: ConnectionOptions,
) -> Connection:
    if options.shared_recv_depth:
        raise ValueError("shared_recv_depth is for listen(): one connection shares with nobody")

    async def finish(cm: AsyncCmId) -> Connection:
        return await Connection.from_id(cm, private_data=private_data, options=options)

    return await establish(host, port, local_address, options, finish)


def listen(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: ConnectionOptions = DEFAULT_OPTIONS,
) -> AwaitableContextManager[Listener]:
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
    return AwaitableContextManager(_listen(host, port, backlog, options))


async def _listen(
    host: str | None, port: int, backlog: int, options: ConnectionOptions
) -> Listener:
    return Listener(await create_listening_ids(host, port, backlog, options), options)
