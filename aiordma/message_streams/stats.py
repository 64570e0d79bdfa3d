"""MessageStreamStats: counters of a message stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiordma._native._fast_path import EagerPath


@dataclass(slots=True)
class MessageStreamStats:
    """A snapshot of a stream's numbers: the result of `MessageStream.stats`. Sizes are in bytes.

    A sent message counts when its last part is posted, a received one when a task has received it.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0
    """The bytes that this side has copied: of the small messages in both directions, and of the
    large ones that recv() has returned. All others were read by the device where they are used."""
    messages_queued: int = 0
    """Messages that wait to be posted: of send_soon(), and of tasks that wait in send()."""
    messages_announced: int = 0
    """Large messages of this side that the peer has not read yet."""
    messages_unread: int = 0
    """Messages that this side has taken from the connection and that no task has received."""
    bytes_pooled: int = 0
    """The registered memory that is kept for the messages to come."""


def with_eager(stats: MessageStreamStats, eager: EagerPath) -> MessageStreamStats:
    """Return these numbers with those of the messages that were handled in C."""
    return replace(
        stats,
        messages_sent=stats.messages_sent + eager.messages_sent,
        bytes_sent=stats.bytes_sent + eager.bytes_sent,
        messages_received=stats.messages_received + eager.messages_received,
        bytes_received=stats.bytes_received + eager.bytes_received,
        bytes_copied=stats.bytes_copied + eager.bytes_sent + eager.bytes_received,
    )
