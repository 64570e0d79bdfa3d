"""ByteStream: round trips, and bytes one way."""

from __future__ import annotations

from collections.abc import Callable

import aiordma
from aiordma.bench.sample import Sample
from aiordma.bench.sides.talking import BytesPeer, answer, ask
from aiordma.bench.work import Work


async def serve(host: str, announce: Callable[[int], None], work: Work) -> None:
    """Serve one client."""
    async with aiordma.listen_stream(host, 0) as listener:
        announce(listener.local_address[1])
        await answer(BytesPeer(await listener.accept()), work)


async def drive(host: str, port: int, work: Work) -> Sample:
    """Be the client."""
    return await ask(BytesPeer(await aiordma.connect_stream(host, port)), work)
