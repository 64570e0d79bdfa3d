"""The interfaces between an endpoint and the data path of its queue pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiordma.dispatch import MemoryDomain
from aiordma.enums import WcOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.qp.send_queue import SendQueue
from aiordma.rdmacm import IdCalls
from aiordma.verbs import AsyncEvent, QueuePair

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc


class DataPath(Protocol):
    """The protocol on a queue pair: messages and one-sided operations, or a byte stream."""

    sends: SendQueue
    counts_flushes: bool
    """True if no message can arrive once the last posted receive is completed or flushed."""

    @property
    def messages_received(self) -> int:
        """The number of messages that have arrived."""

    @property
    def reads_completed(self) -> int:
        """The number of reads that have completed."""

    @property
    def may_read(self) -> bool:
        """True if the sides have agreed that this side can post reads."""

    @property
    def largest_transfer(self) -> int:
        """The most bytes that a request of either side can transfer."""

    @property
    def receives_posted(self) -> int:
        """The number of receives that are posted and not completed or flushed."""

    @property
    def ran_out_of_receives(self) -> bool:
        """True if no receive was flushed: the device had none left when the connection ended."""

    def acquire_domain(self) -> MemoryDomain:
        """Add a user to the protection domain of the queue pair, and return the domain."""

    def prepare(self) -> QueuePair:
        """Make the queue pair and post its receives. Called in a worker thread."""

    def add_prepare(self, calls: IdCalls) -> bool:
        """Add to `calls` what prepare() does, if only the queue pair must be made.

        Return False, and add nothing, if it needs other calls that block, too: registering memory,
        a completion queue. Does not block.
        """

    def negotiated(self, initiator_depth: int) -> None:
        """Use `initiator_depth` as the number of RD/atomic credits: the connection is made."""

    def report_message(self, is_wanted: bool) -> None:
        """Call callbacks.message_arrived() for the first message, or not, if it is not needed."""

    def resume(self) -> None:
        """Start to post requests if they were paused: the peer is ready for them."""

    def probe(self) -> bool:
        """Make the peer's device answer a request of no bytes: on iWARP a read, if it may read.

        Return True if an answer will come. Return False if no request can be posted now.
        """

    def wake(self) -> None:
        """Make the tasks that wait to receive check the state again."""

    def drain(self, then: Callable[[], None]) -> None:
        """Take all completions, those of receives last, then call `then`."""

    def stop(self) -> None:
        """Stop: tasks send nothing more, and no receives are posted any more."""

    def release(self) -> None:
        """Release the shared resources. The queue pair is destroyed."""


class EndpointCallbacks(Protocol):
    """The part of an endpoint that its data path uses: the connection's state, and its events."""

    closed_here: bool
    """True if this side has closed the connection."""

    @property
    def may_be_read(self) -> bool:
        """True if the user can take what has arrived, now or after the connection has ended."""

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""

    @property
    def closed_by_peer(self) -> bool:
        """True if the connection has ended because the peer has closed it: end_reason() says so."""

    @property
    def is_drained(self) -> bool:
        """True if the connection has ended and all messages that had arrived were taken."""

    def check_open(self) -> None:
        """Raise the reason if nothing can be sent any more."""

    def end_reason(self) -> RdmaError:
        """Return the exception that says why the connection ended."""

    async def wait_ended(self) -> None:
        """Wait until the reason for a failed request is known, which takes a short time."""

    @property
    def released(self) -> bool:
        """True if the connection is being destroyed. Nothing can be posted any more."""

    def post_failed(self, error: VerbsError) -> RdmaError:
        """Return the exception to raise for a request that the device refused."""

    def fail(self, cause: RdmaError) -> None:
        """End the connection. The first cause is kept."""

    def request_failed(self, opcode: WcOpcode, wc: IbvWc) -> None:
        """Handle the completion of a request that failed or was flushed."""

    def message_arrived(self) -> None:
        """Note that a message has arrived: the peer has the connection established.

        Called for the first message if report_message() asked for it, perhaps for others, too.
        """

    def request_completed(self) -> None:
        """Note that a request has completed."""

    def queue_pair_event(self, event: AsyncEvent) -> None:
        """Handle an asynchronous event of the queue pair."""

    def device_failed(self, error: VerbsError) -> None:
        """End the connection: the device is removed, and no completion will come any more."""
