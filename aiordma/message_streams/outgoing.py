"""Outgoing messages: what is still to be posted for each, and the memory that the peer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiordma.memory import MemoryRegion
from aiordma.message_streams.protocol import Announcement, MessageProtocol
from aiordma.message_streams.wire import RemoteFrame


class Outgoing(Protocol):
    """A message, or the end of the messages, that waits to be posted."""

    is_over: bool
    """True if its sender need not wait any more."""

    @property
    def has_begun(self) -> bool:
        """True if next_wire() was called: the rest must follow."""

    @property
    def is_taken(self) -> bool:
        """True if next_wire() has returned the last wire message."""

    def may_post(self, protocol: MessageProtocol) -> bool:
        """Return True if the peer takes the next wire message now."""

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """Return the next wire message. It takes a credit."""

    def release(self) -> None:
        """Release the memory: the peer does not read it any more."""


class EagerOutgoing:
    """A message that is sent with its bytes."""

    def __init__(self, frames: Sequence[memoryview]) -> None:
        self._sizes = [frame.nbytes for frame in frames]
        self._data = b"".join(frames)
        self.has_begun = self.is_taken = self.is_over = False

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing."""
        return protocol.credits > 0

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        self.has_begun = self.is_taken = True
        return protocol.eager(self._sizes) + self._data

    def release(self) -> None:
        """See Outgoing. The bytes are a copy."""


class FinishOutgoing:
    """The end of the messages of this side."""

    def __init__(self) -> None:
        self.has_begun = self.is_taken = self.is_over = False

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing. It takes no credit."""
        return True

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        self.has_begun = self.is_taken = True
        return protocol.finish()

    def release(self) -> None:
        """See Outgoing. It has no memory."""


class AnnouncedOutgoing:
    """A message whose memory the peer reads. It is over when the peer has read it."""

    def __init__(self, frames: Sequence[RemoteFrame], regions: Sequence[MemoryRegion]) -> None:
        """`regions` were registered for this message, and are closed at its end."""
        self._frames = frames
        self._regions = regions
        self._announcement: Announcement | None = None
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """See Outgoing."""
        return self._announcement is not None

    @property
    def is_taken(self) -> bool:
        """See Outgoing."""
        return self._announcement is not None and self._announcement.is_listed

    @property
    def number(self) -> int:
        """The number of the announced message, after next_wire()."""
        assert self._announcement is not None
        return self._announcement.number

    def may_post(self, protocol: MessageProtocol) -> bool:
        """See Outgoing."""
        return protocol.credits > 0 and (self.has_begun or protocol.announcements > 0)

    def next_wire(self, protocol: MessageProtocol) -> bytes:
        """See Outgoing."""
        if self._announcement is None:
            self._announcement = protocol.announce(self._frames)
        return protocol.next_part(self._announcement)

    def release(self) -> None:
        """See Outgoing."""
        for region in self._regions:
            region.close()
