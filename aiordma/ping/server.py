"""The other side of a ping: an echo for anybody, any number at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiordma.errors import ConnectError, RdmaError
from aiordma.messages.connect import listen as listen_for_peers
from aiordma.messages.connection import Connection
from aiordma.messages.listener import ConnectRequest, Listener
from aiordma.ping.handshake import announced_size, greeting, options_for, refusal
from aiordma.ping.options import MAX_SIZE
from aiordma.rdmacm import DeviceAddress, device_addresses, parse_address

Say = Callable[[str], None]


async def listen(host: str | None, port: int, say: Say) -> None:
    """Answer everybody until this is cancelled; who comes and who goes is said.

    Raises: as aiordma.listen(); DeviceRemoved.
    """
    devices = await asyncio.to_thread(device_addresses)
    async with listen_for_peers(host, port) as listener:
        own, port = listener.local_address
        say(f"listening on port {port} at {_places(devices, host, own)}; Ctrl-C ends it")
        await serve(listener, say)


def _places(devices: list[DeviceAddress], host: str | None, own: str) -> str:
    """Where a listener that was asked for `host`, and is bound to `own`, can be reached."""
    found = [at for at in devices if not host or _covers(own, at.host)]
    return ", ".join(f"{at.host} ({at.device})" for at in found) or own


def _covers(own: str, host: str) -> bool:
    if own in ("::", "0.0.0.0"):
        return (":" in own) == (":" in host)
    return own == host


async def serve(listener: Listener, say: Say) -> None:
    """Answer everybody who comes to a listener, until it is closed.

    Raises:
        DeviceRemoved: the device went away.
    """
    failure: RdmaError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            async for request in listener:
                tasks.create_task(_answer(request, say))
        except RdmaError as error:  # raised below: in here it would be wrapped in a group
            failure = error
    if failure is not None:
        raise failure


async def _answer(request: ConnectRequest, say: Say) -> None:
    """Accept one peer with what its messages need, and echo; no peer's failure is another's."""
    host, port = request.peer_address
    who = f"{host} port {port}"
    size = announced_size(request.private_data)
    try:
        if size is not None and size > MAX_SIZE:
            say(f"{who}: refused, its messages of {size} bytes are too large")
            await request.reject(refusal(f"messages of at most {MAX_SIZE} bytes are answered"))
            return
        agreed = b"" if size is None else greeting(size)
        async with request.accept(agreed, options_for(size)) as connection:
            await _echo(connection, who, say)
    except (RdmaError, ValueError) as error:
        say(f"{who}: {error}")


async def _echo(connection: Connection, who: str, say: Say) -> None:
    say(f"{who}: connected, with messages of up to {connection.max_message_size} bytes")
    answered = 0
    try:
        async for message in connection:
            await connection.send(message)
            answered += 1
    finally:
        say(f"{who}: gone after {answered} messages")


async def first_address(family: socket.AddressFamily | None) -> DeviceAddress:
    """The first address of this machine that an RDMA device answers at; rather not link-local.

    Raises:
        VerbsError: ENODEV when there is no RDMA device.
        ConnectError: none has an address of that family.
    """
    found = [
        address
        for address in await asyncio.to_thread(device_addresses)
        if family is None or parse_address(address.host).family is family
    ]
    if not found:
        raise ConnectError("no RDMA device of this machine has such an IP address")
    return min(found, key=lambda address: "%" in address.host)


@asynccontextmanager
async def listening_here(host: str) -> AsyncIterator[int]:
    """Answer at one of this machine's own addresses while the block runs; the port."""
    async with listen_for_peers(host, 0) as listener:
        answering = asyncio.create_task(serve(listener, lambda _: None))
        try:
            yield listener.local_address[1]
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
