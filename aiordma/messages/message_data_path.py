"""MessageDataPath: everything that the queue pair of a Connection carries, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.cm import AsyncCmId
from aiordma.dispatch import BusyPoll, MemoryDomain
from aiordma.enums import AsyncEventType, WcOpcode, WcStatus, WrOpcode
from aiordma.errors import VerbsError
from aiordma.loop import checkpoint_halves_of
from aiordma.messages.receiver import Receiver
from aiordma.messages.remote_access import read_access
from aiordma.messages.slow_path import SlowPath
from aiordma.options import ConnectionOptions
from aiordma.qp.data_path import EndpointCallbacks
from aiordma.qp.last_receive import LastReceive
from aiordma.qp.operation import WC_OPCODE_OF, Operation, Operations
from aiordma.qp.post_list import PostList
from aiordma.qp.probe import Probe, probe_by_write
from aiordma.qp.receive_ring import RECEIVE, ReceiveRing
from aiordma.qp.resources import QueuePairResources
from aiordma.qp.send_queue import NUMBER_MASK, SendQueue
from aiordma.qp.shared_receives import SharedReceives
from aiordma.qp.stats import ConnectionStats
from aiordma.rdmacm import IdCalls
from aiordma.verbs import AsyncEvent, ProtectionDomain, QueuePair, QueuePairCaps
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc
    from aiordma.memory import RemoteBuffer
    from aiordma.qp.scatter_gather import Sink, Source

SUCCESS, RECV = int(WcStatus.SUCCESS), WcOpcode.RECV


class MessageDataPath:
    """The queues of one connection, the objects that use them, and the routing of completions."""

    def __init__(
        self,
        cm: AsyncCmId,
        callbacks: EndpointCallbacks,
        options: ConnectionOptions,
        shared_receives: SharedReceives | None,
    ) -> None:
        loop, device = cm.handle.loop, cm.device()
        self._cm, self._handle, self._device = cm, cm.handle, device
        self._last_receive: LastReceive | None = None
        if shared_receives is not None:
            shared_receives.acquire()
            cm.handle.add_released_callback(shared_receives.release)
            if LastReceive.is_needed(device):
                self._last_receive = LastReceive(loop, self.drain)
        self._callbacks = callbacks
        self._shared_receives = shared_receives
        self._qp: QueuePair | None = None
        # On iWARP one receive more. If the device flushes it at the end, no message was lost: see
        # ran_out_of_receives.
        receive_depth = options.recv_depth + device.is_iwarp
        caps = QueuePairCaps(
            max_send_wr=options.send_depth,
            max_recv_wr=0 if shared_receives else receive_depth,
            max_send_sge=options.max_sge,
            max_inline_data=options.max_inline,
        )
        # On siw, reads can complete after requests that were posted later. Those completions return
        # the reads' send credits, so that the completion queue needs room for more requests.
        late_reads = options.initiator_depth if device.is_iwarp else 0
        self._resources = QueuePairResources(
            cm, self, caps, late_reads, own_domain=options.own_protection_domain
        )
        loop_device = self._resources.loop_device
        self._busy_sending = self._busy_receiving = BusyPoll(loop_device, options.busy_poll)
        if shared_receives is not None:  # the two directions have different completion queues
            self._busy_receiving = BusyPoll(loop_device, options.busy_poll)

        max_inline = options.max_inline
        if max_inline > options.max_message_size:
            max_inline = options.max_message_size
        # The InfiniBand specification defines the request that SendQueue.signal_tail() posts. iWARP
        # devices can differ, so that there every request is signaled.
        self.sends = SendQueue(
            loop,
            options.send_depth,
            selective=not device.is_iwarp,
            max_inline=max_inline,
        )
        self._options = options
        operations = Operations(loop, self.sends, callbacks, self._busy_sending)
        self.start_transfer = self.sends.core.start_transfer
        """Start an operation on one piece of registered memory on the fast path. Return None if the
        operation needs the slow path."""
        self.finish = operations.finish
        """Wait until the operation of start_transfer() has completed."""
        self._operations = operations
        self._slow: SlowPath | None = None
        self.initiator_depth = 0
        """The number of reads and atomics that can be in flight. 0 until it is negotiated."""
        core = self.sends.core
        core.checkpoints = checkpoint_halves_of(type(loop))
        core.set_slow(self._send)
        core.set_slow_access(self._read, self._write)
        self._ring = (
            shared_receives.ring
            if shared_receives
            else ReceiveRing(receive_depth, options.max_message_size)
        )
        self.receiver = Receiver(
            loop,
            self._ring,
            callbacks,
            self.sends.stats,
            self._busy_receiving,
            operations.make_future,
        )
        self.counts_flushes = shared_receives is None and not device.is_iwarp
        """True if no message can follow when the last posted receive has completed."""
        if shared_receives is not None or device.is_iwarp:
            self.receiver.set_backlog(options.recv_backlog)

    def prepare(self) -> QueuePair:
        """Make the queue pair and post the receives. Blocks: call it in a worker thread.

        Raises:
            VerbsError: the device or the locked-memory limit does not allow it.
        """
        resources, shared_receives = self._resources, self._shared_receives
        if shared_receives is None:
            self._handle.add_destroyed_callback(self._free_ring, self._blocks_to_free)
            qp = resources.make_qp(self._ring, self.sends)
        else:
            qp = resources.make_srq_qp(shared_receives, self.sends)
            shared_receives.add(qp.number, self, resources.key)
            self._wait_for_last_receive(qp)
        self._use(qp)
        return qp

    def add_prepare(self, calls: IdCalls) -> bool:
        """Add to `calls` what prepare() does. Return False if that is not possible: see DataPath.

        It is not with shared receives, which need the number of the queue pair.
        """
        if self._shared_receives is not None:
            return False
        qp = self._resources.add_qp(calls, self._ring, self.sends)
        if qp is None:
            return False
        self._handle.add_destroyed_callback(self._free_ring, self._blocks_to_free)
        self._use(qp)
        return True

    def _use(self, qp: QueuePair) -> None:
        """Send and receive with `qp`."""
        resources = self._resources
        resources.attach_fast_path(self.sends.core, self.receiver.queue, self._on_notified)
        self._qp = qp
        core = self.sends.core
        core.use_memory(resources.domain.pd, self._options.max_message_size)
        self._busy_sending.open(resources.send_cq)
        self._busy_receiving.open(resources.recv_cq)
        dispatcher, busy_poll = resources.loop_device.dispatcher, self._busy_receiving.nanoseconds
        self.receiver.queue.set_polling(dispatcher, resources.recv_cq.cq.address, busy_poll)
        self.receiver.polling.open(dispatcher, busy_poll, self._options.adaptive_poll)
        core.set_polling(dispatcher, resources.send_cq.cq.address, busy_poll)
        self.sends.post_list = PostList(core, dispatcher, self._on_post_error)
        resources.watch(qp, self._on_queue_pair_event)

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain of the queue pair."""
        return self._resources.domain.pd

    def _is_ring_in_use(self) -> bool:
        """Return True if the user can still take a message, or holds one."""
        return self._callbacks.may_be_read or self.sends.stats.messages_held > 0

    def _free_ring(self) -> None:
        """Give back the receive buffers. If they are in use, only unregister them."""
        if not self._is_ring_in_use():
            self._ring.give_back(self._resources.domain)
        self._ring.close()

    def _blocks_to_free(self) -> bool:
        """Return True if _free_ring() blocks."""
        return self._is_ring_in_use() or not self._ring.is_kept_by(self._resources.domain)

    def _wait_for_last_receive(self, qp: QueuePair) -> None:
        """Take all completions of the shared receives before `qp` is destroyed."""
        last = self._last_receive
        if last is not None:
            self._handle.is_slow_to_destroy = True
            self._handle.add_pre_destroy_hook(last, lambda: last.wait(qp))

    def acquire_domain(self) -> MemoryDomain:
        """Add a user to the protection domain of the queue pair, and return the domain."""
        return self._resources.domain.acquire()

    @property
    def receives_posted(self) -> int:
        """The number of receives that are posted and not completed."""
        return self._ring.posted

    @property
    def ran_out_of_receives(self) -> bool:
        """After the end: True if the device has flushed no receive, because none was left."""
        return self._shared_receives is None and not self._ring.failed

    def snapshot(self) -> ConnectionStats:
        """Return the statistics of this moment."""
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
            recv_waits=stats.recv_waits + queue.waits,
            spilled=queue.spilled,
            sends_posted=len(self.sends),
            receives_posted=self._ring.posted,
            messages_unread=len(self.receiver),
        )

    # --- the slow path ---

    @property
    def slow(self) -> SlowPath:
        """The operations that the core leaves to Python. Made when the first one is needed."""
        if self._slow is None:
            self._slow = SlowPath(
                self._cm,
                self._device,
                self._operations,
                self._options,
                self.pd,
                self.initiator_depth,
            )
        return self._slow

    def _send(self, data: Source, error: int = 0) -> Coroutine[object, None, None]:
        return self.slow.sender.send(data, error)

    def _read(self, remote: RemoteBuffer, into: Sink) -> Coroutine[object, None, None]:
        return self.slow.remote.read(remote, into)

    def _write(
        self, source: Source, remote: RemoteBuffer, imm: int = NO_IMMEDIATE
    ) -> Coroutine[object, None, None]:
        return self.slow.remote.write(source, remote, imm)

    # --- completions ---

    def complete(self, number: int, wc: IbvWc) -> None:
        """Handle a completion from the dispatcher."""
        if number & RECEIVE:
            self._ring.completed()
            self.received(number & NUMBER_MASK, wc)
            return
        completed = self.sends.completed(number, failed=wc.status != SUCCESS)
        opcode = WcOpcode.SEND
        if isinstance(completed, Operation):
            completed.succeeded = wc.status == SUCCESS
            opcode = completed.opcode
        elif isinstance(completed, Probe):
            opcode = completed.opcode
        elif isinstance(completed, fast_path.Transfer):
            opcode = WC_OPCODE_OF[WrOpcode(completed.opcode)]
        if wc.status != SUCCESS:
            self._callbacks.request_failed(opcode, wc)
        self._callbacks.request_completed()

    def _on_notified(self) -> None:
        """Handle the notification that the fast path has received messages."""
        self.receiver.check_queue()
        self._callbacks.message_arrived()

    def received(self, slot: int, wc: IbvWc) -> None:
        """Handle the completion of a receive."""
        if wc.status == SUCCESS:
            self.receiver.message_received(slot, wc)
            self._callbacks.message_arrived()
            return
        if self._shared_receives is not None:
            self._shared_receives.repost(slot)
        self._callbacks.request_failed(RECV, wc)
        self.receiver.wake()

    def _on_post_error(self, error: VerbsError) -> None:
        if not self._callbacks.released:  # after that the queue pair can be destroyed
            self._callbacks.post_failed(error)

    def _on_queue_pair_event(self, event: AsyncEvent) -> None:
        if event.type is AsyncEventType.QP_LAST_WQE_REACHED and self._last_receive is not None:
            self._last_receive.reached()
        self._callbacks.queue_pair_event(event)

    def negotiated(self, initiator_depth: int) -> None:
        """Allow `initiator_depth` reads and atomics in flight: the connection is established."""
        self.receiver.start()
        self.initiator_depth = initiator_depth
        if initiator_depth:
            core = self.sends.core
            core.allow_reads(read_access(self._device))
            core.release_rd_atomic(initiator_depth)

    def report_message(self, is_wanted: bool) -> None:
        """Call callbacks.message_arrived() for the first message, or not, if it is not needed."""
        self.receiver.queue.notify = is_wanted

    def resume(self) -> None:
        """Let requests be posted, if SendQueue.pause() held them back: the peer is ready."""
        self.sends.resume()

    @property
    def messages_received(self) -> int:
        """The number of messages that have arrived."""
        return self.receiver.queue.messages

    @property
    def reads_completed(self) -> int:
        """The number of reads that have completed."""
        return self.sends.core.reads_completed

    @property
    def may_read(self) -> bool:
        """True if the sides have agreed that this side can post reads."""
        return self.initiator_depth > 0

    @property
    def largest_transfer(self) -> int:
        """The most bytes that a request of either side can transfer."""
        return max(self._options.max_message_size, self._resources.domain.largest_region)

    def probe(self) -> bool:
        """Make the peer's device answer a write of no bytes; on iWARP a read, if it may read."""
        try:
            if self._device.is_iwarp and self.may_read:
                return self.slow.remote.probe()
            return probe_by_write(self.sends)
        except VerbsError as error:
            self._callbacks.post_failed(error)
            return False

    def wake(self) -> None:
        """Wake the task that waits to receive, so that it checks the state again."""
        self.receiver.wake()

    def device_failed(self, error: VerbsError) -> None:
        """End the connection: the device was removed, and no completion will come any more."""
        if self._last_receive is not None:
            self._last_receive.stop()
        self._callbacks.device_failed(error)

    def drain(self, then: Callable[[], None]) -> None:
        """Take all completions, those of receives last, then call `then`."""
        self._resources.drain(then)

    # --- the end ---

    def stop(self) -> None:
        """Stop sending and posting receives, and wake the tasks that wait."""
        if self._shared_receives is None:
            self._ring.stop()
        self.sends.stop()
        self.sends.wake_senders()
        self.sends.core.release_rd_atomic(NUMBER_MASK)  # wakes all who wait for a credit
        self.receiver.stop()

    def release(self) -> None:
        """Release shared resources. The queue pair is destroyed."""
        self.sends.core.set_polling(None, 0, -1)
        self.receiver.polling.close()
        self.receiver.queue.set_polling(None, 0, -1)
        self.receiver.queue.set_parking(None, None, None)
        self.sends.abandon()
        if self._shared_receives is not None and self._qp is not None:
            self._shared_receives.remove(self._qp.number, self._release_shared_receives)

    def _release_shared_receives(self) -> None:
        if self._callbacks.closed_here:
            self.receiver.abandon()
        else:
            self.receiver.copy_out()

    def unlink(self) -> None:
        """Remove the references from the core to these objects, which have no user any more."""
        self.sends.core.unlink()
        self.sends.post_list = None
        self.receiver.queue.unlink()
