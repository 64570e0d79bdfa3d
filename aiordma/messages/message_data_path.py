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
from aiordma.messages.memory_windows import MemoryWindows
from aiordma.messages.receiver import Receiver
from aiordma.messages.remote_access import RemoteAccess
from aiordma.messages.sender import Sender
from aiordma.options import ConnectionOptions
from aiordma.qp.data_path import EndpointCallbacks
from aiordma.qp.operation import WC_OPCODE_OF, Operation, Operations
from aiordma.qp.post_list import PostList
from aiordma.qp.receive_ring import ReceiveRing
from aiordma.qp.resources import RECEIVE, QueuePairResources
from aiordma.qp.scatter_gather import ScatterGatherBuilder
from aiordma.qp.send_queue import NUMBER_MASK, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.qp.stats import ConnectionStats
from aiordma.verbs import QueuePair, QueuePairCaps

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

SUCCESS = int(WcStatus.SUCCESS)


class MessageDataPath:
    """The queues of one connection, who fills and empties them, and where completions go."""

    def __init__(
        self,
        cm: AsyncCmId,
        callbacks: EndpointCallbacks,
        options: ConnectionOptions,
        receives: SharedReceives | None,
    ) -> None:
        loop, device = cm.loop, cm.device()
        self._callbacks = callbacks
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
        self._resources = QueuePairResources(cm, self, caps, late)
        self._adaptive_poll = options.adaptive_poll
        self._busy_sending = BusyPoll(self._resources.loop_device, options.busy_poll)
        self._busy_receiving = BusyPoll(self._resources.loop_device, options.busy_poll)

        # InfiniBand lays down what close_tail() posts; iWARP devices may differ.
        self.sends = SendQueue(
            loop,
            options.send_depth,
            selective=not device.is_iwarp,
            max_inline=min(options.max_inline, options.max_message_size),
        )
        self.sends.core.max_message_size = options.max_message_size
        operations = Operations(loop, self.sends, callbacks, self._busy_sending)
        self.start_transfer = self.sends.core.start_transfer
        """Start what registered memory in one piece is for; None: that takes the long way."""
        self.finish = operations.finish
        """Wait for the end of that."""
        self._builder = ScatterGatherBuilder(self.sends, options.max_sge, cm.handle.call)
        self.sender = Sender(operations, self._builder, options)
        self.remote = RemoteAccess(device, operations, self._builder, options.max_inline)
        self.windows = MemoryWindows(cm, operations)

        self._ring = (
            receives.ring if receives else ReceiveRing(receive_depth, options.max_message_size)
        )
        self.receiver = Receiver(
            loop, self._ring, callbacks, self.sends.stats, self._busy_receiving
        )
        self._receives_flushed = 0
        self.counts_flushes = receives is None and not device.is_iwarp
        """Whether the end of the last receive tells that no message is to come any more."""
        if receives is not None:
            receives.acquire()
        if receives is not None or device.is_iwarp:
            self.receiver.set_backlog(options.recv_backlog)

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive. In a worker thread.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        resources, receives = self._resources, self._receives
        resources.attach_fast_path(self.sends.core, self.receiver.queue, self._on_notified)
        if receives is None:
            qp = resources.make_qp(self._ring, self.sends)
        else:
            qp = resources.make_srq_qp(receives, self.sends)
            receives.add(qp.number, self)
        self._qp = qp
        self._builder.pd = self.windows.pd = self.sends.core.pd = resources.loop_device.pd
        self._busy_sending.open(resources.send_cq)
        self._busy_receiving.open(resources.recv_cq)
        completions, busy = resources.loop_device.dispatcher, self._busy_receiving.nanoseconds
        self.receiver.polling.open(completions, resources.recv_cq.cq, busy, self._adaptive_poll)
        core = self.sends.core
        core.set_polling(completions, resources.send_cq.cq.address, busy)
        self.sends.post_list = PostList(qp, core, completions, self._on_post_error)
        resources.watch(qp, self._callbacks.queue_pair_event)
        return qp

    @property
    def receives_posted(self) -> int:
        """Buffers that the device has for messages to come."""
        return self._ring.posted

    @property
    def ran_out_of_receives(self) -> bool:
        """After the end: whether the device had no buffer of its own left to give back."""
        return self._receives is None and not self._receives_flushed

    def snapshot(self) -> ConnectionStats:
        """The numbers of this moment."""
        stats, core, queue = self.sends.stats, self.sends.core, self.receiver.queue
        return replace(
            stats,
            messages_sent=stats.messages_sent + core.messages,
            bytes_sent=stats.bytes_sent + core.nbytes,
            send_waits=stats.send_waits + core.rd_atomic_waits,
            reads=stats.reads + core.reads,
            bytes_read=stats.bytes_read + core.bytes_read,
            writes=stats.writes + core.writes,
            bytes_written=stats.bytes_written + core.bytes_written,
            messages_received=queue.messages,
            bytes_received=queue.nbytes,
            spilled=queue.spilled,
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
        memory = self.sends.completed(number, failed=wc.status != SUCCESS)
        opcode = WcOpcode.SEND
        if isinstance(memory, Operation):
            memory.succeeded = wc.status == SUCCESS
            opcode = memory.opcode
        elif isinstance(memory, fast_path.Transfer):
            opcode = WC_OPCODE_OF[WrOpcode(memory.opcode)]
        if wc.status != SUCCESS:
            self._callbacks.request_failed(opcode, wc)
        self._callbacks.request_completed()

    def _on_notified(self) -> None:
        """Messages have arrived, and it was asked for to be told."""
        self.receiver.check_queue()
        self._callbacks.message_arrived()

    def received(self, slot: int, wc: IbvWc) -> None:
        """A receive ended."""
        if wc.status == SUCCESS:
            self.receiver.message_received(slot, wc)
            self._callbacks.message_arrived()
            return
        self._receives_flushed += 1
        if self._receives is not None:
            self._receives.repost(slot)
        self._callbacks.request_failed(WcOpcode.RECV, wc)
        self.receiver.wake()

    def _on_post_error(self, error: VerbsError) -> None:
        if not self._callbacks.released:  # if it is, the queue pair may be gone
            self._callbacks.post_failed(error)

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made: so many reads and atomics may be under way from here."""
        self.remote.negotiated(initiator_depth)

    def resume(self) -> None:
        """The peer is ready for the first requests, if they were held back."""
        self.sends.resume()

    def probe(self) -> None:
        """Have the peer's device say something, if reads were negotiated."""
        self.remote.probe()

    def wake(self) -> None:
        """Have whoever waits to receive look again."""
        self.receiver.wake()

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._callbacks.device_failed(error)

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""
        self._resources.drain(then)

    # --- the end ---

    def stop(self) -> None:
        """Nothing will be sent any more, and nothing new received."""
        if self._receives is None:
            self._ring.stop()
        self.sends.stop()
        self.sends.wake_senders()
        self.remote.stop()
        self.receiver.stop()

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.sends.abandon()
        self.sends.core.set_polling(None, 0, -1)
        self.receiver.polling.close()
        receives = self._receives
        if receives is not None:
            if self._qp is not None:
                receives.remove(self._qp.number, self)
            self.receiver.abandon()
            receives.release()
        self._resources.release()
