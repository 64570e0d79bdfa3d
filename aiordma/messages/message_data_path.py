"""Traffic: all that a connection's queue pair carries, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.cm import AsyncCmId
from aiordma.dispatch import BusyPoll
from aiordma.enums import WcOpcode, WcStatus, WrOpcode
from aiordma.errors import VerbsError
from aiordma.messages.memory_windows import Windows
from aiordma.messages.receiver import Receiver
from aiordma.messages.remote_access import RemoteAccess
from aiordma.messages.sender import Sender
from aiordma.options import ConnectionOptions
from aiordma.qp.data_path import Owner
from aiordma.qp.operation import COMPLETION_OF, Operation, Operations
from aiordma.qp.post_list import Together
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.resources import RECEIVE, Berth
from aiordma.qp.scatter_gather import Gatherer
from aiordma.qp.send_queue import NUMBER_MASK, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs import QueuePair, QueuePairCaps

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

SUCCESS = int(WcStatus.SUCCESS)


class Traffic:
    """The queues of one connection, who fills and empties them, and where completions go."""

    def __init__(
        self,
        cm: AsyncCmId,
        owner: Owner,
        options: ConnectionOptions,
        receives: SharedReceives | None,
    ) -> None:
        loop, device = cm.loop, cm.device()
        self._owner = owner
        self._receives = receives
        self._qp: QueuePair | None = None
        # On iWARP one more: as long as that is there at the end, no message was lost (see ran_dry).
        receive_depth = options.recv_depth + device.is_iwarp
        caps = QueuePairCaps(
            max_send_wr=options.send_depth,
            max_recv_wr=0 if receives else receive_depth,
            max_send_sge=options.max_sge,
            max_inline_data=options.max_inline,
        )
        # On Linux's siw reads may end after what was posted later, which gives their places away.
        late = options.initiator_depth if device.is_iwarp else 0
        self._berth = Berth(cm, self, caps, late)
        self._adaptive_poll = options.adaptive_poll
        self._busy_sending = BusyPoll(self._berth.shared, options.busy_poll)
        self._busy_receiving = BusyPoll(self._berth.shared, options.busy_poll)

        # InfiniBand lays down what close_tail() posts; iWARP devices may differ.
        self.sends = SendQueue(
            loop,
            options.send_depth,
            selective=not device.is_iwarp,
            max_inline=min(options.max_inline, options.max_message_size),
        )
        self.sends.lane.max_message = options.max_message_size
        operations = Operations(loop, self.sends, owner, self._busy_sending)
        self.transfer = self.sends.lane.transfer
        """Start what registered memory in one piece is for; None: that takes the long way."""
        self.finish = operations.finish
        """Wait for the end of that."""
        self._gatherer = Gatherer(self.sends, options.max_sge, cm.handle.call)
        self.sender = Sender(operations, self._gatherer, options)
        self.remote = RemoteAccess(device, operations, self._gatherer, options.max_inline)
        self.windows = Windows(cm, operations)

        self._ring = (
            receives.ring if receives else ReceiveRing(receive_depth, options.max_message_size)
        )
        self.receiver = Receiver(loop, self._ring, owner, self.sends.stats, self._busy_receiving)
        self._receives_flushed = 0
        self.counts_flushes = receives is None and not device.is_iwarp
        """Whether the end of the last receive tells that no message is to come any more."""
        if receives is not None:
            receives.use()
        if receives is not None or device.is_iwarp:
            self.receiver.spill(options.recv_backlog)

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive. In a worker thread.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        berth, receives = self._berth, self._receives
        berth.take_lanes(self.sends.lane, self.receiver.arrivals, self._look)
        if receives is None:
            qp = berth.make_qp(self._ring, self.sends)
        else:
            qp = berth.make_sharing_qp(receives, self.sends)
            receives.add(qp.number, self)
        self._qp = qp
        self._gatherer.pd = self.windows.pd = self.sends.lane.domain = berth.shared.pd
        self._busy_sending.open(berth.queue)
        self._busy_receiving.open(berth.receive_queue)
        completions, busy = berth.shared.lanes, self._busy_receiving.nanoseconds
        self.receiver.outlook.open(completions, berth.receive_queue.cq, busy, self._adaptive_poll)
        lane = self.sends.lane
        lane.look_out(completions, berth.queue.cq.address, busy)
        self.sends.together = Together(qp, lane, completions, self._refused)
        berth.watch(qp, self._owner.queue_pair_event)
        return qp

    @property
    def receives_posted(self) -> int:
        """Buffers that the device has for messages to come."""
        return self._ring.posted

    @property
    def ran_dry(self) -> bool:
        """After the end: whether the device had no buffer of its own left to give back."""
        return self._receives is None and not self._receives_flushed

    def snapshot(self) -> ConnectionStats:
        """The numbers of this moment."""
        stats, lane, arrivals = self.sends.stats, self.sends.lane, self.receiver.arrivals
        return replace(
            stats,
            messages_sent=stats.messages_sent + lane.messages,
            bytes_sent=stats.bytes_sent + lane.nbytes,
            send_waits=stats.send_waits + lane.turn_waits,
            reads=stats.reads + lane.reads,
            bytes_read=stats.bytes_read + lane.bytes_read,
            writes=stats.writes + lane.writes,
            bytes_written=stats.bytes_written + lane.bytes_written,
            messages_received=arrivals.messages,
            bytes_received=arrivals.nbytes,
            spilled=arrivals.spilled,
            sends_posted=len(self.sends),
            receives_posted=self._ring.posted,
            messages_unread=len(self.receiver),
        )

    # --- completions ---

    def complete(self, number: int, wc: IbvWc) -> None:
        """Take a completion from the dispatcher."""
        if number & RECEIVE:
            self._ring.completed()
            self.received(number & NUMBER_MASK, wc)
            return
        lent = self.sends.completed(number, failed=wc.status != SUCCESS)
        opcode = WcOpcode.SEND
        if isinstance(lent, Operation):
            lent.succeeded = wc.status == SUCCESS
            opcode = lent.opcode
        elif isinstance(lent, fast_path.Transfer):
            opcode = COMPLETION_OF[WrOpcode(lent.opcode)]
        if wc.status != SUCCESS:
            self._owner.request_failed(opcode, wc)
        self._owner.request_ended()

    def _look(self) -> None:
        """Messages have arrived, and it was asked for to be told."""
        self.receiver.look()
        self._owner.message_arrived()

    def received(self, slot: int, wc: IbvWc) -> None:
        """A receive ended."""
        if wc.status == SUCCESS:
            self.receiver.arrived(slot, wc)
            self._owner.message_arrived()
            return
        self._receives_flushed += 1
        if self._receives is not None:
            self._receives.give_back(slot)
        self._owner.request_failed(WcOpcode.RECV, wc)
        self.receiver.wake()

    def _refused(self, error: VerbsError) -> None:
        if not self._owner.released:  # if it is, the queue pair may be gone
            self._owner.not_posted(error)

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made: so many reads and atomics may be under way from here."""
        self.remote.negotiated(initiator_depth)

    def let_go(self) -> None:
        """The peer is ready for the first requests, if they were held back."""
        self.sends.let_go()

    def knock(self) -> None:
        """Have the peer's device say something, if reads were negotiated."""
        self.remote.knock()

    def wake(self) -> None:
        """Have whoever waits to receive look again."""
        self.receiver.wake()

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._owner.device_failed(error)

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""
        self._berth.drain(then)

    # --- the end ---

    def stop(self) -> None:
        """Nothing will be sent any more, and nothing new received."""
        if self._receives is None:
            self._ring.stop()
        self.sends.stop()
        self.sends.wake_senders()
        self.remote.ended()
        self.receiver.stop()

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.sends.abandon()
        self.sends.lane.look_out(None, 0, -1)
        self.receiver.outlook.close()
        receives = self._receives
        if receives is not None:
            if self._qp is not None:
                receives.remove(self._qp.number, self)
            self.receiver.abandon()
            receives.release()
        self._berth.release()
