"""The client of a ping: connect, send numbered messages, and check the answers."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass, replace

from aiordma.cm import AsyncCmId, close_after
from aiordma.cm.resolving import resolve_host, try_addresses
from aiordma.errors import ConnectError, RdmaError, Unreachable
from aiordma.loop import running_loop
from aiordma.messages.connection import Connection
from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping.options import PingOptions
from aiordma.ping.private_data import announced_size, announcement, options_for
from aiordma.ping.report import PrintLine, Statistics
from aiordma.ping.server import first_address, local_server
from aiordma.rdmacm import SocketAddress


class MessageTooLarge(RdmaError):
    """The connection failed, probably because the peer does not accept messages of that size."""


async def ping(options: PingOptions, statistics: Statistics, print_line: PrintLine) -> None:
    """Connect, and send the messages that the options ask for.

    Prints a line for the connection and for each answer, and counts the answers in `statistics`.
    Returns when every message was answered, correctly or not.

    Raises:
        RdmaError: connecting failed, or the connection failed.
        TimeoutError: an answer did not come in time.
        ValueError: the device does not support the options.
    """
    timed = await timed_connect(options)
    async with timed.connection as connection:
        host, port = connection.peer_address
        statistics.peer = f"{host} port {port}"
        print_line(str(timed))
        try:
            await _send_all(connection, options, statistics, print_line)
        except TimeoutError:
            connection.abort()  # aclose() would wait for the peer, too
            raise
        except RdmaError as error:
            raise _explained(error, connection, options) from error


async def ping_self(options: PingOptions, statistics: Statistics, print_line: PrintLine) -> None:
    """Ping the first RDMA address of this machine, and answer in this process.

    Raises: as ping().
    """
    own = await first_address(options.family)
    print_line(f"no host was given: pinging {own.host} ({own.device}) of this machine")
    async with local_server(own.host) as port:
        await ping(replace(options, host=own.host, port=port), statistics, print_line)


# --- connecting ---


@dataclass(frozen=True, slots=True)
class TimedConnection:
    """A connection, its device, and the duration of each connect step in seconds."""

    connection: Connection
    device: str
    address_time: float
    route_time: float
    connect_time: float

    def __str__(self) -> str:
        local, (peer, port) = self.connection.local_address[0], self.connection.peer_address
        times = (
            f"address {self.address_time * 1e3:.2f} ms, route {self.route_time * 1e3:.2f} ms, "
            f"connection {self.connect_time * 1e3:.2f} ms"
        )
        return f"{self.device} at {local} to {peer} port {port}: {times}"


class _Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the stopwatch was made."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before


async def timed_connect(options: PingOptions) -> TimedConnection:
    """Connect to the first address of the host that answers, and time each step.

    Raises: as aiordma.connect(); Unreachable also if the peer does not answer in time.
    """
    loop = running_loop()
    sources = [] if options.source is None else await resolve_host(loop, options.source, 0)
    source_of = {own.family: own for own in reversed(sources)}
    found = _of_family(await resolve_host(loop, options.host, options.port), options)

    async def attempt(address: SocketAddress) -> TimedConnection:
        return await _attempt(address, source_of.get(address.family), options)

    return await try_addresses(
        [address for address in found if not sources or address.family in source_of],
        attempt,
        (options.host, options.port),
    )


def _of_family(found: list[SocketAddress], options: PingOptions) -> list[SocketAddress]:
    if options.family is None:
        return found
    matching = [address for address in found if address.family is options.family]
    if not matching:
        version = 4 if options.family is socket.AF_INET else 6
        raise ConnectError(f"{options.host} has no IPv{version} address")
    return matching


async def _attempt(
    address: SocketAddress, source: SocketAddress | None, options: PingOptions
) -> TimedConnection:
    cm = await AsyncCmId.create()
    try:
        if source is not None:
            cm.bind_addr(source)
        stopwatch = _Stopwatch()
        await cm.resolve_addr(address, timeout=options.wait)
        address_time = stopwatch.lap()
        await cm.resolve_route(timeout=options.wait)
        route_time = stopwatch.lap()
        device = f"{cm.device().name} ({cm.device().transport.name})"
        connection = await _connect(cm, address, options)
    except BaseException as error:
        await close_after(cm, error)
        raise
    return TimedConnection(connection, device, address_time, route_time, stopwatch.lap())


async def _connect(cm: AsyncCmId, address: SocketAddress, options: PingOptions) -> Connection:
    """Connect within `options.wait` seconds: the connection manager retries for a minute or more.

    Raises: as Connection.from_id(); Unreachable if the peer does not answer in time.
    """
    data = announcement(options.size)
    connection_options = options_for(options.size, options.busy_poll)
    try:
        async with asyncio.timeout(options.wait):
            return await Connection.from_id(cm, private_data=data, options=connection_options)
    except TimeoutError:
        host, port = address.pair
        text = f"{host} port {port} does not answer: no reply within {options.wait:g} s"
        raise Unreachable(text) from None


# --- sending messages and checking the answers ---


async def _send_all(
    connection: Connection, options: PingOptions, statistics: Statistics, print_line: PrintLine
) -> None:
    messages = Messages(options.size)
    numbers = itertools.count(1) if options.count is None else range(1, options.count + 1)
    due = time.monotonic()
    for number in numbers:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + options.interval
        message = messages[number]
        print_line(await _round_trip(connection, number, message, options.wait, statistics))


async def _round_trip(
    connection: Connection, number: int, message: bytes, wait: float, statistics: Statistics
) -> str:
    """Send a message, wait for its answer and count it. Return the line that reports the answer."""
    begin = time.perf_counter()
    try:
        answer = await _exchange(connection, message, wait)
    except TimeoutError:
        statistics.lost += 1
        raise TimeoutError(f"no answer to seq={number} within {wait:g} s") from None
    except RdmaError:
        statistics.lost += 1
        raise
    seconds = time.perf_counter() - begin
    statistics.add(seconds)
    line = f"{len(answer)} bytes from {statistics.peer}: seq={number} time={seconds * 1e3:.3f} ms"
    wrong = difference(message, answer)
    statistics.wrong += wrong is not None
    return line if wrong is None else f"{line} WRONG: {wrong}"


async def _exchange(connection: Connection, message: bytes, wait: float) -> bytes:
    async with asyncio.timeout(wait):
        await connection.send(message)
        return await connection.recv()


def _explained(error: RdmaError, connection: Connection, options: PingOptions) -> RdmaError:
    """Return MessageTooLarge if a large message was sent to a peer that did not accept its size."""
    accepted = announced_size(connection.private_data) is not None
    if accepted or options.size <= DEFAULT_OPTIONS.max_message_size:
        return error
    return MessageTooLarge(f"the peer does not accept messages of {options.size} bytes: {error}")


_NUMBER_SIZE = 8
_PATTERN = bytes(range(256))


class Messages:
    """Numbered messages of one size. The number and the pattern make a wrong answer visible."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pattern = _PATTERN * (size // len(_PATTERN) + 2)

    def __getitem__(self, number: int) -> bytes:
        """Return the number in 8 bytes, then a pattern that starts at a different byte each time.

        A message of less than 8 bytes consists of the last bytes of the number.
        """
        head = number.to_bytes(_NUMBER_SIZE, "big")[-self._size :]
        begin = number % len(_PATTERN)
        return head + self._pattern[begin : begin + self._size - len(head)]


def difference(sent: bytes, answer: bytes) -> str | None:
    """Return a description of the first difference; None if the answer is correct."""
    if answer == sent:
        return None
    if len(answer) != len(sent):
        return f"{len(answer)} bytes instead of {len(sent)}"
    numbers = [int.from_bytes(message[:_NUMBER_SIZE], "big") for message in (sent, answer)]
    if numbers[0] != numbers[1]:
        return f"number {numbers[1]} instead of {numbers[0]}"
    at = next(at for at, byte in enumerate(sent) if byte != answer[at])
    return f"byte {at} is {answer[at]:#04x} instead of {sent[at]:#04x}"
