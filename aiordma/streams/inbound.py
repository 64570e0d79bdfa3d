"""Inbound: the receive buffer, whose halves are announced to the peer one after the other."""

from __future__ import annotations

from aiordma._native import fast_path
from aiordma.errors import ProtocolError
from aiordma.streams.wire import Segment


class Inbound(fast_path.InboundCore):
    """The bytes that were received and not read, and the space and credits that the peer has.

    It holds numbers only, no memory. They are in C, because each message changes them.

    The buffer is a ring. The peer fills each announced half to its end before it begins the next.
    So the unread bytes follow each other in the ring.
    """

    def __init__(self, buffer: Segment, messages: int) -> None:
        """Start with credits for `messages` messages."""
        super().__init__(buffer.addr, buffer.key, buffer.length, messages)
        self.first_buffer = buffer._replace(length=buffer.length // 2)
        """The first half of the buffer, which the connection data announces."""

    def data_received(self, nbytes: int) -> None:
        """Count `nbytes` that the peer reports as written.

        Raises:
            ProtocolError: more bytes than the space that was announced to the peer.
        """
        if not self._data_received(nbytes):
            raise ProtocolError(
                f"the peer reports {nbytes} bytes written, but had room for {self.announced}"
            )
