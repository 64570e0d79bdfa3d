"""RdmaByteListener: a listener of anyio's, whose peers are RdmaByteStreams."""

from __future__ import annotations

from aiordma.anyio.byte_stream import RdmaByteStream
from aiordma.anyio.serving import Serving
from aiordma.streams import ByteStream, StreamListener


class RdmaByteListener(Serving[ByteStream, RdmaByteStream]):
    """Accepts peers. From `aiordma.anyio.listen_stream()`.

    Closing it rejects the peers that nobody has taken, and leaves the streams that were accepted
    alone. Every await is a checkpoint.
    """

    def __init__(self, listener: StreamListener) -> None:
        """Present a listener of this loop's as one of anyio's, which owns it from now on."""
        super().__init__(listener, RdmaByteStream)
        self._accept_next = listener.accept

    async def accept(self) -> RdmaByteStream:
        """Wait for a peer that connects, and accept it.

        A peer that gives up halfway, or speaks no rsocket, is passed over. Cancelling may lose the
        one peer that was just being accepted.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device it was bound to went away; its `__cause__` says so.
            BusyResourceError: another task is waiting for peers.
            VerbsError: a peer could not be accepted, for want of memory for one; others still can.
        """
        return await self._accept(self._accept_next)
