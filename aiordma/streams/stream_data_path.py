"""StreamDataPath: the data path of a stream: its memory, its queues and its completions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiordma._native import fast_path
from aiordma.cm import AsyncCmId
from aiordma.dispatch import AdaptivePolling, BusyPoll, MemoryDomain
from aiordma.enums import AccessFlags, WcOpcode, WcStatus
from aiordma.errors import ProtocolError, VerbsError
from aiordma.memory import AllocatedRegion
from aiordma.qp import (
    NUMBER_MASK,
    RECEIVE,
    EndpointCallbacks,
    QueuePairResources,
    ReceiveRing,
    SendQueue,
)
from aiordma.qp.probe import Probe, probe_by_read, probe_by_write
from aiordma.rdmacm import IdCalls
from aiordma.streams.options import MESSAGE_SIZE, StreamOptions
from aiordma.streams.protocol import Settings, StreamProtocol, target_sgl_size
from aiordma.streams.stream_sender import StreamSender
from aiordma.streams.wire import MAPPING_SIZE, Segment
from aiordma.verbs import ProtectionDomain, QueuePair, QueuePairCaps
from aiordma.verbs.completion import immediate

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

SUCCESS = int(WcStatus.SUCCESS)
CACHE_LINE = 64


def _next_cache_line(offset: int) -> int:
    return -(-offset // CACHE_LINE) * CACHE_LINE


class StreamDataPath:
    """The memory and the queues of one stream.

    Call all methods on the thread of the loop, except where stated otherwise.
    """

    def __init__(
        self,
        cm: AsyncCmId,
        callbacks: EndpointCallbacks,
        options: StreamOptions,
        on_change: Callable[[], None],
    ) -> None:
        """Call `on_change` whenever sending can have become possible, or the stream can have ended.

        Bytes that arrive set the waiter of the core.
        """
        device = cm.device()
        self.is_iwarp = device.is_iwarp
        self._cm = cm
        self._callbacks = callbacks
        self._options = options
        self._on_change = on_change
        self._resources = QueuePairResources(
            cm,
            self,
            QueuePairCaps(
                max_send_wr=options.send_depth,
                max_recv_wr=options.recv_depth,
                max_send_sge=1,
                # Messages of the protocol itself are always inline, never copied to the send ring.
                max_inline_data=max(options.max_inline, MAPPING_SIZE),
            ),
            own_domain=options.own_protection_domain,
        )
        self.busy = BusyPoll(self._resources.loop_device, options.busy_poll)
        self.dispatcher = self._resources.loop_device.dispatcher
        self.sends = SendQueue(cm.loop, options.send_depth, selective=not device.is_iwarp)
        self.counts_flushes = not device.is_iwarp
        self.may_read = False
        """True if the sides have agreed that this side can post reads."""
        self.reads_completed = 0
        """The number of reads that have completed: all are probes."""
        self._messages_received = 0
        # Always False: the peer has fewer credits than there are receives.
        self.ran_out_of_receives = False
        self._receives = ReceiveRing(options.recv_depth, MESSAGE_SIZE)
        self._buffer: memoryview
        self.protocol: StreamProtocol
        self.core: fast_path.StreamDataPathCore
        """The C half of this object: it sends and receives data."""
        self.sender: StreamSender
        self.polling: AdaptivePolling
        """The policy for the time that a read polls before it parks."""

    # --- setting up: called in a worker thread ---

    def allocate(self) -> None:
        """Register the memory, and create the protocol and the sender.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        options, handle = self._options, self._cm.handle
        domain = self._resources.open()
        sgl_size = target_sgl_size(options.mappings)
        # The peer can write to all of this memory, also to the slots of its own messages: it gains
        # nothing. Each part begins at a cache line: a device then writes each target at once.
        slots = _next_cache_line(sgl_size)
        start = _next_cache_line(slots + options.recv_depth * MESSAGE_SIZE)
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        receive_memory = AllocatedRegion(domain.pd, start + options.recv_buffer, access)
        handle.add_destroyed_callback(partial(self._release_memory, receive_memory))
        self._receives.use_part(receive_memory, slots)
        send_memory = domain.parts.take(options.send_buffer)
        handle.add_destroyed_callback(partial(domain.parts.give_back, send_memory))
        settings = Settings(
            options.recv_depth,
            Segment(receive_memory.address, receive_memory.rkey, sgl_size),
            Segment(receive_memory.address + start, receive_memory.rkey, options.recv_buffer),
            sys.byteorder,
            self.is_iwarp,
            options.mappings,
        )
        self._buffer = buffer = receive_memory.view[start:]
        self.protocol = StreamProtocol(settings, receive_memory.view[:sgl_size])
        ring = fast_path.SendRing(options.send_buffer)
        self.core = fast_path.StreamDataPathCore(
            self.sends.core,
            self._receives,
            self.protocol.inbound,
            self.protocol.outbound,
            ring,
            buffer,
            send_memory.view,
            send_memory.address,
            send_memory.lkey,
            options.max_inline,
            options.send_depth,
            self.is_iwarp,
        )
        self.polling = AdaptivePolling(self.core)
        self.sender = StreamSender(
            self.protocol,
            self.core,
            self.sends,
            self._callbacks,
            send_memory,
            ring,
            is_iwarp=self.is_iwarp,
        )

    def _release_memory(self, memory: AllocatedRegion) -> None:
        """Free receive memory; only unregister it if the user can still read bytes from it."""
        if self._callbacks.may_be_read:
            memory.close()
        else:
            memory.free()

    def prepare(self) -> QueuePair:
        """Create the queue pair and post the receives."""
        qp = self._resources.make_qp(self._receives, self.sends)
        self._use(qp)
        return qp

    def add_prepare(self, calls: IdCalls) -> bool:
        """Add to `calls` what prepare() does. Return False if it blocks: see DataPath."""
        qp = self._resources.add_qp(calls, self._receives, self.sends)
        if qp is None:
            return False
        self._use(qp)
        return True

    def _use(self, qp: QueuePair) -> None:
        """Send and receive with `qp`."""
        resources = self._resources
        self._cm.handle.add_destroyed_callback(self._receives.close, lambda: False)
        resources.attach_fast_path(self.sends.core, self.core, self._on_notified)
        cq = resources.send_cq
        self.busy.open(cq)
        for core in (self.core, self.sends.core):
            core.set_polling(self.dispatcher, cq.cq.address, self.busy.nanoseconds)
        resources.watch(qp, self._callbacks.queue_pair_event)

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain of all memory that the stream uses."""
        return self._resources.domain.pd

    def acquire_domain(self) -> MemoryDomain:
        """Add a user to the protection domain of the stream, and return the domain."""
        return self._resources.domain.acquire()

    # --- receiving ---

    @property
    def messages_received(self) -> int:
        """The number of messages of the protocol that have arrived."""
        return self._messages_received + self.core.messages_received

    @property
    def receives_posted(self) -> int:
        """The number of receives that are posted and not completed."""
        return self._receives.posted

    def complete(self, number: int, wc: IbvWc) -> None:
        """Process a completion from the dispatcher."""
        if number & RECEIVE:
            self._receives.completed()
            self._received(number & NUMBER_MASK, wc)
        else:
            completed = self.sends.completed(number)
            if wc.status != SUCCESS:
                opcode = WcOpcode.RDMA_WRITE
                if isinstance(completed, Probe):
                    opcode = completed.opcode
                self._callbacks.request_failed(opcode, wc)
            self._callbacks.request_completed()
        self.sender.post_controls()
        self._on_change()

    def _on_notified(self) -> None:
        """Handle the notification that the core has processed completions."""
        send_error, receive_error = self.core.take_notification()
        if send_error:
            self._callbacks.post_failed(VerbsError(send_error, "ibv_post_send"))
        elif receive_error:
            self._callbacks.fail(VerbsError(receive_error, "ibv_post_recv"))
        if self.core.messages_received:
            self._callbacks.message_arrived()
        if self.protocol.has_queued_controls:  # the core has posted the credit updates
            self.sender.post_controls()
        self._on_change()

    def _received(self, slot: int, wc: IbvWc) -> None:
        if wc.status != SUCCESS:
            self._callbacks.request_failed(WcOpcode.RECV, wc)
            return
        self._messages_received += 1
        message = immediate(wc)
        if message is None:
            data = self._receives.view(slot, wc.byte_len)
            message = int.from_bytes(data, sys.byteorder)
        try:
            self._receives.post(slot)
            self.protocol.received(message)
        except (ProtocolError, VerbsError) as error:
            self._callbacks.fail(error)
            return
        self._callbacks.message_arrived()

    # --- calls of the endpoint ---

    def negotiated(self, initiator_depth: int) -> None:
        """Store the result of the negotiation: with an initiator depth of 0, no read is posted."""
        self.may_read = initiator_depth > 0

    def report_message(self, is_wanted: bool) -> None:
        """Call callbacks.message_arrived() for the first message, or not, if it is not needed."""
        self.core.notify = is_wanted

    def resume(self) -> None:
        """Post the requests that were held back until the peer was ready."""
        self.sends.resume()
        self.sender.post_controls()
        self._on_change()

    @property
    def largest_transfer(self) -> int:
        """The most bytes that a request of either side can transfer."""
        return max(self._options.recv_buffer, self._resources.domain.largest_region)

    def probe(self) -> bool:
        """Send rsocket's KEEPALIVE; on iWARP post a read of no bytes, or a write without reads."""
        try:
            if not self.is_iwarp:
                self.protocol.keep_alive()
                self.sender.post_controls()
                return True
            if self.may_read:
                return probe_by_read(self.sends, self._count_read)
            return probe_by_write(self.sends)
        except VerbsError as error:
            self._callbacks.post_failed(error)
            return False

    def _count_read(self) -> None:
        self.reads_completed += 1

    def wake(self) -> None:
        """Wake the waiting tasks, which then check the state again."""
        self._on_change()

    def drain(self, then: Callable[[], None]) -> None:
        """Process the completions of all completed receives, then call `then`."""
        self._resources.drain(then)

    def device_failed(self, error: VerbsError) -> None:
        """Report that the device has failed: there are no more completions."""
        self._callbacks.device_failed(error)

    def stop(self) -> None:
        """Stop receiving. From now on each completion is handled here."""
        self._receives.stop()
        self.sends.core.add_waiter()
        if hasattr(self, "core"):
            self.core.may_park = False
            self.core.closed = self._callbacks.closed_here

    def release(self) -> None:
        """Release the shared resources. Called when the queue pair has been destroyed."""
        if hasattr(self, "core"):
            for core in (self.core, self.sends.core):
                core.set_polling(None, 0, -1)
            self.core.set_parking(None, None, None)
            self.polling.close()
        self.sends.abandon()
