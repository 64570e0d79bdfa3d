"""Outbox: the messages of one side of a stream until they are over, and the order of posting."""

from __future__ import annotations

from collections import deque

from aiordma.message_streams.outgoing import AnnouncedOutgoing, FinishOutgoing, Outgoing
from aiordma.message_streams.protocol import MessageProtocol
from aiordma.message_streams.stats import MessageStreamStats


class Outbox:
    """The messages that are to be posted, those that the peer reads, and the control messages.

    A wire message that was taken and is not posted yet comes before everything else. Control
    messages come before messages.
    """

    def __init__(self, protocol: MessageProtocol, stats: MessageStreamStats) -> None:
        self.messages: deque[Outgoing] = deque()
        """The messages of which a part is not posted."""
        self.announced: dict[int, AnnouncedOutgoing] = {}
        """The messages whose memory the peer reads, by their numbers."""
        self.unattended: set[Outgoing] = set()
        """The messages for whose end no task waits: those of send_soon(), and those of which a part
        is posted and whose senders were cancelled."""
        self._protocol = protocol
        self._stats = stats
        self.controls: deque[bytes] = deque()
        """The wire messages that take no credit, apart from FINISH."""
        self.wire: tuple[bytes, Outgoing | None] | None = None
        """The wire message that was taken and is not posted yet, and its message."""

    @property
    def is_idle(self) -> bool:
        """True if nothing is to be posted, and the peer reads no memory."""
        return not (self.messages or self.announced or self.controls or self.wire)

    @property
    def has_finished(self) -> bool:
        """True if the end of the messages waits to be posted."""
        return bool(self.messages) and isinstance(self.messages[-1], FinishOutgoing)

    def next_wire(self) -> bytes | None:
        """Return the next wire message if one may be posted now. It is the same until posted()."""
        if self.wire is None:
            if self.controls:
                self.wire = self.controls.popleft(), None
            elif self.messages and self.messages[0].may_post(self._protocol):
                outgoing = self.messages[0]
                self.wire = outgoing.next_wire(self._protocol), outgoing
                if isinstance(outgoing, AnnouncedOutgoing):
                    self.announced[outgoing.number] = outgoing
            else:
                return None
        return self.wire[0]

    def posted(self) -> None:
        """Note that the wire message is posted."""
        assert self.wire is not None
        _, outgoing = self.wire
        self.wire = None
        if outgoing is None or not outgoing.is_taken or not self.messages:  # after the end
            return
        self.messages.popleft()
        if not isinstance(outgoing, FinishOutgoing):
            stats = self._stats
            stats.messages_sent += 1
            stats.bytes_sent += outgoing.nbytes
            stats.bytes_copied += outgoing.copied
        if not isinstance(outgoing, AnnouncedOutgoing):
            self._finish(outgoing)

    def done(self, number: int) -> None:
        """Note that the peer does not read the memory of a message any more."""
        if number in self.announced:  # which it is not after the end
            self._finish(self.announced.pop(number))

    def withdraw(self, outgoing: Outgoing) -> None:
        """Drop a message whose sender was cancelled, unless a part of it is posted."""
        if outgoing not in self.messages and outgoing not in self.announced.values():
            return  # it is over, or the stream has ended
        if outgoing.has_begun:
            self.unattended.add(outgoing)
        else:
            self.messages.remove(outgoing)
            outgoing.is_over = True
            outgoing.release()

    def drop(self) -> None:
        """Release all memory: the stream has ended."""
        for outgoing in (*self.announced.values(), *self.messages):
            outgoing.release()
        self.announced.clear()
        self.messages.clear()
        self.unattended.clear()

    def _finish(self, outgoing: Outgoing) -> None:
        outgoing.is_over = True
        outgoing.release()
        self.unattended.discard(outgoing)
