"""Inbound: the receive buffer, of which one half after the other is announced to the peer."""

from __future__ import annotations

from typing import NamedTuple

from aiordma.errors import ProtocolError
from aiordma.streams.wire import Segment


class CreditUpdate(NamedTuple):
    """What the peer gets: a total of messages it may have sent, and perhaps a further buffer."""

    credits: int
    buffer: Segment | None


class Inbound:
    """What came and was not read, and what the peer may still send. Numbers only, no memory.

    The buffer is a ring. The peer fills each announced half to its end before it begins the next,
    so that what is to be read is always one stretch of the ring.
    """

    def __init__(self, buffer: Segment, messages: int) -> None:
        """For a peer that may send so many `messages` ahead."""
        self._buffer = buffer
        self._half = buffer.length // 2
        self._ring = 2 * self._half
        self._messages = messages
        self._seen = 0
        self._next_update = messages // 2
        # The first half is announced by the connection data, the second is not yet.
        self._announced = self._half
        self._announce_at = self._half
        self._read = self._half
        self._start = 0
        self.available = 0
        """Bytes that have come and are not read."""

    @property
    def first_buffer(self) -> Segment:
        """What the connection data announces."""
        return self._buffer._replace(length=self._half)

    def arrived(self, nbytes: int) -> None:
        """The peer says that it wrote so many bytes.

        Raises:
            ProtocolError: it had not so much room.
        """
        if nbytes > self._announced:
            raise ProtocolError(
                f"the peer says it wrote {nbytes} bytes where it had room for {self._announced}"
            )
        self._announced -= nbytes
        self.available += nbytes
        self._seen += 1

    def count_message(self) -> None:
        """The peer used one of its messages for something that is no data."""
        self._seen += 1

    def readable(self, limit: int) -> tuple[int, int]:
        """Where in the ring the next bytes are, at most `limit` and no further than its end."""
        return self._start, min(limit, self.available, self._ring - self._start)

    def consume(self, nbytes: int) -> None:
        """So many of them were read."""
        self.available -= nbytes
        self._read += nbytes
        self._start += nbytes
        if self._start == self._ring:
            self._start = 0

    @property
    def has_update(self) -> bool:
        """Whether the peer is to be told of more."""
        return self._read >= self._half or self._seen >= self._next_update

    @property
    def has_buffer_to_announce(self) -> bool:
        """Whether that includes a buffer."""
        return self._read >= self._half

    def take_update(self) -> CreditUpdate:
        """What to tell it now."""
        self._next_update = self._seen + self._messages // 2
        total = self._seen + self._messages
        if not self.has_buffer_to_announce:
            return CreditUpdate(total, None)
        buffer = Segment(self._buffer.addr + self._announce_at, self._buffer.key, self._half)
        self._announce_at = (self._announce_at + self._half) % self._ring
        self._announced += self._half
        self._read -= self._half
        return CreditUpdate(total, buffer)
