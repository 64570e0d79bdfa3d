"""RdmaListener: a listener of trio's, whose peers are RdmaStreams."""

from __future__ import annotations

from trio.abc import Listener

import aiordma
from aiordma.errors import RdmaError, VerbsError
from aiordma.streams import StreamListener
from aiordma.streams.options import DEFAULT_OPTIONS, StreamOptions
from aiordma.trio.errors import raise_as_trio
from aiordma.trio.stream import RdmaStream


class RdmaListener(Listener[RdmaStream]):
    """Accepts peers, as trio.serve_listeners() wants them. From `aiordma.trio.listen_stream()`."""

    def __init__(self, listener: StreamListener) -> None:
        """Present a listener as one of trio's, which owns it from now on."""
        self._listener = listener

    @property
    def local_address(self) -> tuple[str, int]:
        """`(host, port)` where peers can connect; the port is the real one if 0 was asked for."""
        return self._listener.local_address

    async def accept(self) -> RdmaStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or speaks no rsocket, is passed over. Cancelling may lose the
        one peer that was just being accepted.

        Raises:
            trio.ClosedResourceError: the listener was closed, before or while this waited.
            trio.BrokenResourceError: the device it was bound to went away.
            trio.BusyResourceError: another task is waiting for peers.
            VerbsError: a peer could not be accepted, for want of memory for one; others still can.
        """
        try:
            return RdmaStream(await self._listener.accept())
        except VerbsError:
            raise
        except RdmaError as error:
            raise_as_trio(error)

    async def aclose(self) -> None:
        """Stop listening, and wait until that is done. Idempotent.

        Cancelling stops the waiting only.
        """
        await self._listener.aclose()

    def __repr__(self) -> str:
        return f"<RdmaListener of {self._listener!r}>"


async def listen_stream(
    host: str | None,
    port: int,
    *,
    backlog: int = 0,
    options: StreamOptions = DEFAULT_OPTIONS,
) -> RdmaListener:
    """Listen for whoever speaks rsocket: a listener for trio.serve_listeners().

    As aiordma.listen_stream(), with its arguments, its exceptions and what cancelling does.
    """
    return RdmaListener(await aiordma.listen_stream(host, port, backlog=backlog, options=options))
