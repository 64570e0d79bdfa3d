"""ConnectionStats: what a connection has carried, and how full its queues are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConnectionStats:
    """Numbers of one moment, as `Connection.stats` gives them. Sizes are bytes.

    What is sent counts from its posting, what is received from its arrival.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    reads: int = 0
    """RDMA READs from here; likewise the others."""
    bytes_read: int = 0
    writes: int = 0
    bytes_written: int = 0
    atomics: int = 0
    send_waits: int = 0
    """How often a task had to wait for a place in the send queue, or for its turn to read."""
    recv_waits: int = 0
    """How often a task had to wait for a message."""
    spilled: int = 0
    """Messages that were copied to keep receives posted: see `recv_backlog`."""
    sends_posted: int = 0
    """Requests in the send queue, as far as the device has reported."""
    receives_posted: int = 0
    """Buffers that the device has for messages to come."""
    messages_unread: int = 0
    """Messages that have arrived, and wait to be received."""
    messages_held: int = 0
    """Messages of recv_message() that are not released yet."""
