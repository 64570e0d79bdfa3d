"""ConnectionStats: counters of a connection's operations, and the state of its queues."""

from __future__ import annotations

from dataclasses import dataclass


# Without slots, a field that was never set is the default of the class.
@dataclass
class ConnectionStats:
    """A snapshot of a connection's numbers: the result of `Connection.stats`. Sizes are in bytes.

    A sent message counts when it is posted, a received one when it arrives.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    reads: int = 0
    """RDMA READs posted by this side. `writes` and `atomics` count operations of this side, too."""
    bytes_read: int = 0
    writes: int = 0
    bytes_written: int = 0
    atomics: int = 0
    send_waits: int = 0
    """The number of times that a task had to wait for a send credit or an RD/atomic credit."""
    recv_waits: int = 0
    """The number of times that a task had to wait for a message."""
    spilled: int = 0
    """The number of messages that were copied to keep receives posted (see `recv_backlog`)."""
    sends_posted: int = 0
    """Requests in the send queue whose completion has not been reported."""
    receives_posted: int = 0
    """Receive buffers that are posted for new messages."""
    messages_unread: int = 0
    """Messages that have arrived and that no task has taken."""
    messages_held: int = 0
    """Messages of recv_message() that are not released yet."""
