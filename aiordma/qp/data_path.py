"""Load: what a connection's queue pair carries, as far as its Endpoint needs to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiordma.qp.send_queue import SendQueue
from aiordma.verbs import QueuePair


class Load(Protocol):
    """Messages and one-sided operations, or a byte stream."""

    sends: SendQueue
    counts_flushes: bool
    """Whether the end of the last receive tells that nothing is to come any more."""

    @property
    def receives_posted(self) -> int:
        """Receives that the device has not ended yet."""

    @property
    def ran_dry(self) -> bool:
        """After the end: whether the device had no receive of its own left to give back."""

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive. In a worker thread."""

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made: so many reads and atomics may be under way from here."""

    def let_go(self) -> None:
        """The peer is ready for the first requests, if they were held back."""

    def knock(self) -> None:
        """Have the peer's device say something, if reads were negotiated."""

    def wake(self) -> None:
        """Have whoever waits to receive look again."""

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""

    def stop(self) -> None:
        """Nothing will be sent any more by tasks, and nothing new received."""

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
