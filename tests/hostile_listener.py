"""A listener that answers requests with random private data, and then sends random bytes.

As a process of its own it listens for clients of messages, of byte streams and of pings, and prints
its ports. The choices for each request come from the seed and the number of the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from malformed import MAX_PRIVATE_DATA, OPTIONS, Malformed

import aiordma
from aiordma import Connection, ConnectRequest, Listener, RdmaError

ATTACK_SECONDS = 1.5
KINDS = ("messages", "streams", "pings")


class HostileListener:
    """Answers the requests of one listener. Its clients expect what `kind` says, one of KINDS."""

    def __init__(self, listener: Listener, kind: str, seed: int, *, is_iwarp: bool) -> None:
        self._listener = listener
        self._kind = kind
        self._seed = seed
        self._is_iwarp = is_iwarp

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.local_address[1]

    async def serve(self) -> None:
        """Attack each client, until the listener is closed."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            async for request in self._listener:
                seed = f"{self._seed}-{self._kind}-{number}"
                malformed = Malformed(seed, is_iwarp=self._is_iwarp)
                tasks.create_task(self._attack(malformed, request))
                number += 1

    async def _attack(self, malformed: Malformed, request: ConnectRequest) -> None:
        with suppress(RdmaError, OSError, ValueError):
            async with asyncio.timeout(ATTACK_SECONDS):
                await self._answer(malformed, request)
        request.abort()

    async def _answer(self, malformed: Malformed, request: ConnectRequest) -> None:
        """Reject the request, leave it without an answer, or accept it and send data."""
        chance = malformed.chance.random()
        if chance < 0.1:
            await request.reject(malformed.random_bytes(MAX_PRIVATE_DATA))
            return
        if chance < 0.12:
            await asyncio.sleep(ATTACK_SECONDS)
            return
        async with request.accept(self._private_data(malformed), OPTIONS) as connection:
            await malformed.chance.choice(self._calls(malformed))(connection)
            malformed.leave(connection)

    def _private_data(self, malformed: Malformed) -> bytes:
        if malformed.chance.random() < 0.2:
            return malformed.random_bytes(MAX_PRIVATE_DATA)
        match self._kind:
            case "streams":
                return malformed.connection_data()
            case "pings":
                return malformed.ping_announcement()
            case _:
                return b""

    def _calls(self, malformed: Malformed) -> list[Callable[[Connection], Awaitable[None]]]:
        if self._kind == "streams":
            return [malformed.speak_rsocket]
        return [malformed.send_messages, malformed.access_memory, malformed.send_remote_buffers]


async def open_listeners(
    stack: AsyncExitStack, host: str, seed: int, *, is_iwarp: bool
) -> list[HostileListener]:
    """Listen for clients of each of KINDS, until `stack` is closed."""
    opened = []
    for kind in KINDS:
        listener = await stack.enter_async_context(aiordma.listen(host, 0, options=OPTIONS))
        opened.append(HostileListener(listener, kind, seed, is_iwarp=is_iwarp))
    return opened


async def main(seed: str, host: str, is_iwarp: str) -> None:
    """Listen until the process is ended. Print the ports by kind as JSON in one line."""
    async with AsyncExitStack() as stack:
        opened = await open_listeners(stack, host, int(seed), is_iwarp=is_iwarp == "True")
        ports = [each.port for each in opened]
        print(json.dumps(dict(zip(KINDS, ports, strict=True))), flush=True)
        await asyncio.gather(*(each.serve() for each in opened))
