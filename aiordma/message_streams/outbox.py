"""Outbox: what a stream is to post, in order."""

from __future__ import annotations

from collections import deque

from aiordma.message_streams.outgoing import Outgoing
from aiordma.message_streams.protocol import MessageProtocol


class Outbox:
    """The messages that are to be posted, and the control messages, which come first.

    A wire message that was taken and is not posted yet comes before everything else.
    """

    def __init__(self, protocol: MessageProtocol) -> None:
        self.messages: deque[Outgoing] = deque()
        """The messages of which a part is not posted."""
        self._protocol = protocol
        self._controls: deque[bytes] = deque()
        self._wire: tuple[bytes, Outgoing | None] | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be posted."""
        return not (self.messages or self._controls or self._wire)

    @property
    def unprepared(self) -> Outgoing | None:
        """The message that must be prepared before anything can be posted, or None."""
        if self._wire or self._controls or not self.messages:
            return None
        first = self.messages[0]
        return None if first.is_prepared else first

    @property
    def may_proceed(self) -> bool:
        """True if a wire message may be posted now, or a message can be prepared."""
        if self._wire or self._controls:
            return True
        if not self.messages:
            return False
        first = self.messages[0]
        return not first.is_prepared or first.may_post(self._protocol)

    def add_control(self, wire: bytes) -> None:
        """Queue a wire message that takes no credit."""
        self._controls.append(wire)

    def take(self) -> tuple[bytes, Outgoing | None]:
        """Return the next wire message, and the message that it is a part of, if any.

        It is the same one until posted(). It must be allowed now: see `may_proceed`.
        """
        if self._wire is None:
            if self._controls:
                self._wire = self._controls.popleft(), None
            else:
                outgoing = self.messages[0]
                self._wire = outgoing.next_wire(self._protocol), outgoing
        return self._wire

    def posted(self) -> Outgoing | None:
        """Note that the wire message is posted. Return the message if that was its last part."""
        assert self._wire is not None
        _, outgoing = self._wire
        self._wire = None
        if outgoing is None or not outgoing.is_taken or not self.messages:  # after the end
            return None
        return self.messages.popleft()
