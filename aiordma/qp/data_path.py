"""The data path of a queue pair: what it offers to its endpoint, and what it calls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.enums import WcOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.qp.send_queue import SendQueue
from aiordma.verbs import AsyncEvent, QueuePair

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc


class DataPath(Protocol):
    """Messages and one-sided operations, or a byte stream."""

    sends: SendQueue
    counts_flushes: bool
    """Whether the end of the last receive tells that nothing is to come any more."""

    @property
    def receives_posted(self) -> int:
        """Receives that the device has not ended yet."""

    @property
    def ran_out_of_receives(self) -> bool:
        """After the end: whether the device had no receive of its own left to give back."""

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive. In a worker thread."""

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made: so many reads and atomics may be under way from here."""

    def resume(self) -> None:
        """The peer is ready for the first requests, if they were held back."""

    def probe(self) -> None:
        """Have the peer's device say something, if reads were negotiated."""

    def wake(self) -> None:
        """Have whoever waits to receive look again."""

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""

    def stop(self) -> None:
        """Nothing will be sent any more by tasks, and nothing new received."""

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""


class EndpointCallbacks(Protocol):
    """Knows whether the connection is open, and why not; is told of what ends it."""

    closed_here: bool
    """Whether this side has closed it."""

    @property
    def is_drained(self) -> bool:
        """Whether it has ended, and every message that arrived before has been seen."""

    def check_open(self) -> None:
        """Raise why nothing can be sent any more, if that is so."""

    def end_reason(self) -> RdmaError:
        """Why it ended."""

    async def wait_ended(self) -> None:
        """Wait until it is known why a request that failed did, which is soon."""

    @property
    def released(self) -> bool:
        """Whether it is on its way to be destroyed: nothing is to be posted any more."""

    def post_failed(self, error: VerbsError) -> RdmaError:
        """What a refused request means."""

    def fail(self, cause: RdmaError) -> None:
        """End it, for this cause if there was none before."""

    def request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        """The device reports a failed request, or one that was flushed."""

    def message_arrived(self) -> None:
        """The peer has sent something: it has seen the connection made."""

    def request_completed(self) -> None:
        """One request less is on its way."""

    def queue_pair_event(self, event: AsyncEvent) -> None:
        """The device says something about the queue pair."""

    def device_failed(self, error: VerbsError) -> None:
        """No completion will come any more: the device is gone."""
