"""ping() and ping_own(): connect, send numbered messages, and see what comes back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from aiordma.errors import RdmaError
from aiordma.messages.connection import Connection
from aiordma.options import DEFAULT_OPTIONS
from aiordma.ping.handshake import announced_size
from aiordma.ping.messages import Messages, difference
from aiordma.ping.options import Plan
from aiordma.ping.reaching import reach
from aiordma.ping.report import Tally
from aiordma.ping.server import first_address, listening_here


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
