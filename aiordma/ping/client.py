"""ping() and ping_own(): connect, send numbered messages, and see what comes back."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiordma.cm import AsyncCmId
from aiordma.cm.resolving import first_that_answers, resolve_host
from aiordma.errors import ConnectError, RdmaError, Unreachable
from aiordma.loop import running_loop
from aiordma.messages.connection import Connection
from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping.handshake import announced_size, greeting, options_for
from aiordma.ping.options import Plan
from aiordma.ping.report import Tally
from aiordma.ping.server import first_address, listening_here
from aiordma.rdmacm import SocketAddress


class TooLarge(RdmaError):
    """The connection broke, probably because the peer does not take messages of that size."""


async def ping(plan: Plan, tally: Tally, say: Callable[[str], None]) -> None:
    """Ping as planned; what happens is said line by line, and counted in `tally`.

    Returns when all messages of the plan were answered, rightly or wrongly.

    Raises:
        RdmaError: the connection could not be made, or it broke.
        TimeoutError: an answer did not come in time.
        ValueError: the device cannot do it.
    """
    reached = await reach(plan)
    async with reached.connection as connection:
        host, port = connection.peer_address
        tally.peer = f"{host} port {port}"
        say(str(reached))
        try:
            await _talk(connection, plan, tally, say)
        except TimeoutError:
            connection.abort()  # a farewell would wait for an answer, too
            raise
        except RdmaError as error:
            raise _with_size(error, connection, plan) from error


async def ping_own(plan: Plan, tally: Tally, say: Callable[[str], None]) -> None:
    """Ping this machine's own first RDMA address, which is answered right here.

    Raises: as ping().
    """
    own = await first_address(plan.family)
    say(f"no host was given: {own.host} ({own.device}) of this machine answers itself")
    async with listening_here(own.host) as port:
        await ping(replace(plan, host=own.host, port=port), tally, say)


async def _talk(
    connection: Connection, plan: Plan, tally: Tally, say: Callable[[str], None]
) -> None:
    messages = Messages(plan.size)
    numbers = itertools.count(1) if plan.count is None else range(1, plan.count + 1)
    due = time.monotonic()
    for number in numbers:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + plan.interval
        say(await _round_trip(connection, number, messages[number], plan.wait, tally))


async def _round_trip(
    connection: Connection, number: int, message: bytes, wait: float, tally: Tally
) -> str:
    """Send a message and wait for its answer; the line that says what came of it."""
    begin = time.perf_counter()
    try:
        answer = await _echo(connection, message, wait)
    except TimeoutError:
        tally.lost += 1
        raise TimeoutError(f"no answer to seq={number} within {wait:g} s") from None
    except RdmaError:
        tally.lost += 1
        raise
    seconds = time.perf_counter() - begin
    tally.add(seconds)
    line = f"{len(answer)} bytes from {tally.peer}: seq={number} time={seconds * 1e3:.3f} ms"
    wrong = difference(message, answer)
    tally.wrong += wrong is not None
    return line if wrong is None else f"{line} WRONG: {wrong}"


async def _echo(connection: Connection, message: bytes, wait: float) -> bytes:
    async with asyncio.timeout(wait):
        await connection.send(message)
        return await connection.recv()


def _with_size(error: RdmaError, connection: Connection, plan: Plan) -> RdmaError:
    """A large message that breaks the connection to a program that never agreed to its size."""
    agreed = announced_size(connection.private_data) is not None
    if agreed or plan.size <= DEFAULT_OPTIONS.max_message_size:
        return error
    return TooLarge(f"the peer does not take {plan.size} bytes: {error}")


# --- the connect steps ---


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


# --- the messages ---

_NUMBER_SIZE = 8
_PATTERN = bytes(range(256))


class Messages:
    """Numbered messages of one size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pattern = _PATTERN * (size // len(_PATTERN) + 2)

    def __getitem__(self, number: int) -> bytes:
        """The number in 8 bytes, then the pattern from another place on in each message.

        A message of less than 8 bytes has the last bytes of the number.
        """
        head = number.to_bytes(_NUMBER_SIZE, "big")[-self._size :]
        begin = number % len(_PATTERN)
        return head + self._pattern[begin : begin + self._size - len(head)]


def difference(sent: bytes, answer: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer == sent:
        return None
    if len(answer) != len(sent):
        return f"{len(answer)} bytes came back for {len(sent)}"
    numbers = [int.from_bytes(message[:_NUMBER_SIZE], "big") for message in (sent, answer)]
    if numbers[0] != numbers[1]:
        return f"number {numbers[1]} came back for number {numbers[0]}"
    place = next(place for place, byte in enumerate(sent) if byte != answer[place])
    return f"byte {place} came back as {answer[place]:#04x}, and was {sent[place]:#04x}"
