"""MessageListener: a listener of anyio's, whose peers are MessageStreams."""

from __future__ import annotations

from functools import partial

from aiordma.anyio.message_stream import MessageStream
from aiordma.anyio.serving import Serving
from aiordma.messages.connection import Connection
from aiordma.messages.listener import Listener


class MessageListener(Serving[Connection, MessageStream]):
    """Accepts peers. From `aiordma.anyio.listen()`.

    Closing it rejects the peers that nobody has taken, and leaves the streams that were accepted
    alone. Every await is a checkpoint.
    """

    def __init__(self, listener: Listener) -> None:
        """Present a listener of this loop's as one of anyio's, which owns it from now on."""
        super().__init__(listener, MessageStream)
        self._accept_next = listener.accept

    async def accept(self, private_data: bytes = b"") -> MessageStream:
        """Wait for a peer that connects, and accept it.

        `private_data` reaches the peer with the answer; see ConnectRequest.accept(). A peer that
        gives up halfway is passed over. Cancelling may lose the one peer that was just being
        accepted.

        Raises:
            ClosedResourceError: the listener was closed, before or while this waited.
            BrokenResourceError: the device it was bound to went away; its `__cause__` says so.
            BusyResourceError: another task is waiting for peers.
            VerbsError: a peer could not be accepted, for want of memory for one; others still can.
        """
        return await self._accept(partial(self._accept_next, private_data))
