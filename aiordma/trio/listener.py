"""RdmaListener: a trio listener that accepts RdmaStreams."""

from __future__ import annotations

from trio.abc import Listener

import aiordma
from aiordma.cm.accepting import accept_or_log
from aiordma.cm.handshakes import ListenerStats
from aiordma.errors import RdmaError
from aiordma.options import DEFAULT_LIMITS, ListenerLimits
from aiordma.streams import StreamListener
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.trio.errors import raise_as_trio
from aiordma.trio.stream import RdmaStream


class RdmaListener(Listener[RdmaStream]):
    """A listener for trio.serve_listeners(). It is made by `aiordma.trio.listen_stream()`."""

    def __init__(self, listener: StreamListener) -> None:
        """Wrap `listener`, and own it from now on."""
        self._listener = listener

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can connect; the port is the real one if 0 was asked for."""
        return self._listener.local_address

    @property
    def stats(self) -> ListenerStats:
        """A snapshot of the listener's counters, and of the numbers of its peers."""
        return self._listener.stats

    async def accept(self) -> RdmaStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or does not use rsocket, is skipped. If a peer cannot be
        accepted, for example because memory is short, an error is logged, at most once in
        10 seconds. The peer is rejected, and the next one is waited for: trio.serve_listeners()
        would log each such peer, or end. A peer that does not confirm delays no other. Cancelling
        loses no peer.

        Raises:
            trio.ClosedResourceError: the listener was closed, before or while this waited.
            trio.BrokenResourceError: the device that the listener was bound to was removed.
            trio.BusyResourceError: another task is waiting for peers.
        """
        try:
            return RdmaStream(await accept_or_log(self._listener))
        except RdmaError as error:
            raise_as_trio(error)

    async def aclose(self) -> None:
        """Stop listening, and wait until the listener is closed. Idempotent.

        Cancelling stops only the wait.
        """
        await self._listener.aclose()

    def __repr__(self) -> str:
        return f"<RdmaListener of {self._listener!r}>"


async def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    limits: ListenerLimits = DEFAULT_LIMITS,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> RdmaListener:
    """Listen for peers that use rsocket, and return a listener for trio.serve_listeners().

    The arguments, the exceptions and the effect of cancelling are those of aiordma.listen_stream().
    """
    return RdmaListener(
        await aiordma.listen_stream(host, port, backlog=backlog, limits=limits, options=options)
    )
