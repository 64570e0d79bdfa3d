"""The way to the peer, step by step: each is timed, so that one sees where it takes long."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass

from aiordma.cm import AsyncCmId
from aiordma.cm.resolving import first_that_answers, resolve_host
from aiordma.errors import ConnectError, Unreachable
from aiordma.loop import running_loop
from aiordma.messages.connection import Connection
from aiordma.ping.handshake import greeting, options_for
from aiordma.ping.options import Plan
from aiordma.rdmacm import SocketAddress


@dataclass(frozen=True, slots=True)
class Reached:
    """A connection, and how long it took to get there, in seconds."""

    connection: Connection
    device: str
    address_time: float
    route_time: float
    connect_time: float

    def __str__(self) -> str:
        here, (there, port) = self.connection.local_address[0], self.connection.peer_address
        times = (
            f"address {self.address_time * 1e3:.2f} ms, route {self.route_time * 1e3:.2f} ms, "
            f"connection {self.connect_time * 1e3:.2f} ms"
        )
        return f"{self.device} at {here} to {there} port {port}: {times}"


class _Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before


async def reach(plan: Plan) -> Reached:
    """Connect to the first address of the host that answers.

    Raises: as aiordma.connect(); Unreachable also if the peer takes too long.
    """
    loop = running_loop()
    sources = [] if plan.source is None else await resolve_host(loop, plan.source, 0)
    source_of = {own.family: own for own in reversed(sources)}
    found = await resolve_host(loop, plan.host, plan.port)

    async def attempt(address: SocketAddress) -> Reached:
        return await _attempt(address, source_of.get(address.family), plan)

    return await first_that_answers(
        [address for address in _wanted(found, plan) if not sources or address.family in source_of],
        attempt,
        (plan.host, plan.port),
    )


def _wanted(found: list[SocketAddress], plan: Plan) -> list[SocketAddress]:
    if plan.family is None:
        return found
    wanted = [address for address in found if address.family is plan.family]
    if not wanted:
        version = 4 if plan.family is socket.AF_INET else 6
        raise ConnectError(f"{plan.host} has no IPv{version} address")
    return wanted


async def _attempt(address: SocketAddress, source: SocketAddress | None, plan: Plan) -> Reached:
    cm = await AsyncCmId.create()
    async with cm.closed_on_failure():
        if source is not None:
            cm.bind_addr(source)
        watch = _Stopwatch()
        await cm.resolve_addr(address, timeout=plan.wait)
        address_time = watch.lap()
        await cm.resolve_route(timeout=plan.wait)
        route_time = watch.lap()
        device = f"{cm.device().name} ({cm.device().transport.name})"
        connection = await _connect(cm, address, plan)
    return Reached(connection, device, address_time, route_time, watch.lap())


async def _connect(cm: AsyncCmId, address: SocketAddress, plan: Plan) -> Connection:
    """Left alone, the connection manager would ask for a minute or more."""
    options = options_for(plan.size, plan.busy_poll)
    try:
        async with asyncio.timeout(plan.wait):
            return await Connection.from_id(cm, private_data=greeting(plan.size), options=options)
    except TimeoutError:
        host, port = address.pair
        text = f"{host} port {port} does not answer: nothing came within {plan.wait:g} s"
        raise Unreachable(text) from None
