"""StreamStats: counters of a byte stream, and the state of its buffers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StreamStats:
    """A snapshot of a stream's numbers: the result of `ByteStream.stats`. Sizes are in bytes.

    Sent bytes count when they are posted, received ones when they arrive.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_written: int = 0
    """The bytes of iowrite()."""
    send_waits: int = 0
    """The number of times that a task had to wait: for room in the peer's receive buffer or in
    `send_buffer`, or until registered memory was sent."""
    receive_waits: int = 0
    """The number of times that a task had to wait for bytes."""
    sends_posted: int = 0
    """Requests in the send queue whose completion has not been reported."""
    bytes_unread: int = 0
    """Bytes that have arrived and that no task has taken."""
