"""The server of a ping: it echoes the messages of any number of peers at the same time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiordma.errors import ConnectError, RdmaError
from aiordma.messages.connect import listen as listen_for_connections
from aiordma.messages.connection import Connection
from aiordma.messages.listener import ConnectRequest, Listener
from aiordma.ping.options import MAX_SIZE
from aiordma.ping.private_data import announced_size, announcement, options_for, rejection
from aiordma.ping.report import PrintLine
from aiordma.rdmacm import DeviceAddress, device_addresses, parse_address


async def listen(host: str | None, port: int, print_line: PrintLine) -> None:
    """Serve all peers until cancelled. Print a line for each peer that connects or disconnects.

    Raises: as aiordma.listen(); DeviceRemoved.
    """
    devices = await asyncio.to_thread(device_addresses)
    async with listen_for_connections(host, port) as listener:
        own, port = listener.local_address
        reachable = _reachable_addresses(devices, host, own)
        print_line(f"listening on port {port} at {reachable}; Ctrl-C ends it")
        await serve(listener, print_line)


def _reachable_addresses(devices: list[DeviceAddress], host: str | None, own: str) -> str:
    """Return the addresses that reach a listener for `host` that is bound to `own`."""
    found = [at for at in devices if not host or _includes(own, at.host)]
    return ", ".join(f"{at.host} ({at.device})" for at in found) or own


def _includes(own: str, host: str) -> bool:
    """Return True if a listener bound to `own` accepts connections to `host`."""
    if own in ("::", "0.0.0.0"):
        return (":" in own) == (":" in host)
    return own == host


async def serve(listener: Listener, print_line: PrintLine) -> None:
    """Serve all peers of a listener until the listener is closed.

    Raises:
        DeviceRemoved: the device was removed.
    """
    failure: RdmaError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            async for request in listener:
                tasks.create_task(_serve_peer(request, print_line))
        except RdmaError as error:  # raised below: the task group would wrap it in a group
            failure = error
    if failure is not None:
        raise failure


async def _serve_peer(request: ConnectRequest, print_line: PrintLine) -> None:
    """Accept a peer with options for its messages, and echo them. A failure ends this peer only."""
    host, port = request.peer_address
    peer = f"{host} port {port}"
    size = announced_size(request.private_data)
    try:
        if size is not None and size > MAX_SIZE:
            print_line(f"{peer}: rejected, its messages of {size} bytes are too large")
            await request.reject(rejection(f"messages of at most {MAX_SIZE} bytes are answered"))
            return
        accepted = b"" if size is None else announcement(size)
        async with request.accept(accepted, options_for(size)) as connection:
            await _echo(connection, peer, print_line)
    except (RdmaError, ValueError) as error:
        print_line(f"{peer}: {error}")


async def _echo(connection: Connection, peer: str, print_line: PrintLine) -> None:
    print_line(f"{peer}: connected, with messages of up to {connection.max_message_size} bytes")
    answered = 0
    try:
        async for message in connection:
            await connection.send(message)
            answered += 1
    finally:
        print_line(f"{peer}: disconnected after {answered} messages")


async def first_address(family: socket.AddressFamily | None) -> DeviceAddress:
    """Return this machine's first RDMA address; a link-local one only if there is no other.

    Raises:
        VerbsError: ENODEV when there is no RDMA device.
        ConnectError: no device has an address of that family.
    """
    found = [
        address
        for address in await asyncio.to_thread(device_addresses)
        if family is None or parse_address(address.host).family is family
    ]
    if not found:
        kind = {None: "IP", socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}[family]
        raise ConnectError(f"no RDMA device of this machine has an {kind} address")
    return min(found, key=lambda address: "%" in address.host)


@asynccontextmanager
async def local_server(host: str) -> AsyncIterator[int]:
    """Serve at an address of this machine while the block runs; yield the port."""
    async with listen_for_connections(host, 0) as listener:
        serving = asyncio.create_task(serve(listener, lambda _: None))
        try:
            yield listener.local_address[1]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
