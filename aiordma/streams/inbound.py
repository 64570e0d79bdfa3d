"""Inbound: the receive buffer, whose halves are announced to the peer one after the other."""

from __future__ import annotations

from typing import NamedTuple

from aiordma.errors import ProtocolError
from aiordma.streams.wire import Segment


class CreditUpdate(NamedTuple):
    """New credits for the peer, with or without a new receive buffer.

    `credits` is a total: the number of messages that the peer may have sent since the beginning.
    """

    credits: int
    buffer: Segment | None


class Inbound:
    """The bytes that were received and not read, and the space and credits that the peer has.

    It holds numbers only, no memory.

    The buffer is a ring. The peer fills each announced half to its end before it begins the next.
    So the unread bytes follow each other in the ring.
    """

    def __init__(self, buffer: Segment, messages: int) -> None:
        """Start with credits for `messages` messages."""
        self._buffer = buffer
        self._half = buffer.length // 2
        self._ring = 2 * self._half
        self._messages = messages
        self._messages_received = 0
        self._next_update = messages // 2
        # The connection data announces the first half. The first update announces the second.
        self._announced = self._half
        self._announce_at = self._half
        self._read = self._half
        self._start = 0
        self.available = 0
        """Bytes that were received and not read."""

    @property
    def first_buffer(self) -> Segment:
        """The first half of the buffer, which the connection data announces."""
        return self._buffer._replace(length=self._half)

    def data_received(self, nbytes: int) -> None:
        """Count `nbytes` that the peer reports as written.

        Raises:
            ProtocolError: more bytes than the space that was announced to the peer.
        """
        if nbytes > self._announced:
            raise ProtocolError(
                f"the peer reports {nbytes} bytes written, but had room for {self._announced}"
            )
        self._announced -= nbytes
        self.available += nbytes
        self._messages_received += 1

    def count_message(self) -> None:
        """Count a message of the peer that used a credit but carried no data."""
        self._messages_received += 1

    def readable(self, limit: int) -> tuple[int, int]:
        """Return the offset in the ring of the next bytes to read, and their number.

        The number is at most `limit`. The bytes do not go beyond the end of the ring.
        """
        return self._start, min(limit, self.available, self._ring - self._start)

    def consume(self, nbytes: int) -> None:
        """Count `nbytes` as read."""
        self.available -= nbytes
        self._read += nbytes
        self._start += nbytes
        if self._start == self._ring:
            self._start = 0

    @property
    def has_update(self) -> bool:
        """True if the peer needs a credit update."""
        return self._read >= self._half or self._messages_received >= self._next_update

    @property
    def has_buffer_to_announce(self) -> bool:
        """True if the update announces a buffer."""
        return self._read >= self._half

    def take_update(self) -> CreditUpdate:
        """Return the credit update for the peer, and count it as sent."""
        self._next_update = self._messages_received + self._messages // 2
        total = self._messages_received + self._messages
        if not self.has_buffer_to_announce:
            return CreditUpdate(total, None)
        buffer = Segment(self._buffer.addr + self._announce_at, self._buffer.key, self._half)
        self._announce_at = (self._announce_at + self._half) % self._ring
        self._announced += self._half
        self._read -= self._half
        return CreditUpdate(total, buffer)
