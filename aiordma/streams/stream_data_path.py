"""StreamLoad: a stream as what a queue pair carries: its memory, and where completions go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.cm import AsyncCmId
from aiordma.dispatch import BusyPoll
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
from aiordma.streams.options import MESSAGE_SIZE, StreamOptions
from aiordma.streams.protocol import Settings, StreamProtocol, remote_sgl_size
from aiordma.streams.stream_sender import StreamSender
from aiordma.streams.wire import MAPPING_SIZE, Segment
from aiordma.verbs import ProtectionDomain, QueuePair, QueuePairCaps
from aiordma.verbs.completion import immediate

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

SUCCESS = int(WcStatus.SUCCESS)
CACHE_LINE = 64


class StreamDataPath:
    """The memory and the queues of one stream. On the loop's thread but for what says otherwise."""

    def __init__(
        self,
        cm: AsyncCmId,
        callbacks: EndpointCallbacks,
        options: StreamOptions,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever something may have become possible, or impossible."""
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
                # What the protocol itself says always is, and never copied.
                max_inline_data=max(options.max_inline, MAPPING_SIZE),
            ),
        )
        self.busy = BusyPoll(self._resources.loop_device, options.busy_poll)
        self.sends = SendQueue(cm.loop, options.send_depth, selective=not device.is_iwarp)
        self.counts_flushes = not device.is_iwarp
        self._may_read = False
        self.ran_out_of_receives = False  # the peer has fewer credits than there are receives
        self._receives = ReceiveRing(options.recv_depth, MESSAGE_SIZE)
        self._buffer: memoryview
        self.protocol: StreamProtocol
        self.sender: StreamSender

    # --- the beginning: in a worker thread ---

    def allocate(self) -> None:
        """Pin the memory, after which there is a protocol.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        options, handle = self._options, self._cm.handle
        pd = self._resources.open().pd
        remote_sgl = remote_sgl_size(options.mappings)
        # Each begins where a cache line does: a device writes the entries of the board at one go.
        start = -(-remote_sgl // CACHE_LINE) * CACHE_LINE
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        inward = AllocatedRegion(pd, start + options.recv_buffer, access)
        handle.add_destroyed_callback(inward.close)
        outward = AllocatedRegion(pd, options.send_buffer, AccessFlags.LOCAL_WRITE)
        handle.add_destroyed_callback(outward.close)
        settings = Settings(
            options.recv_depth,
            Segment(inward.address, inward.rkey, remote_sgl),
            Segment(inward.address + start, inward.rkey, options.recv_buffer),
            sys.byteorder,
            self.is_iwarp,
            options.mappings,
        )
        self._buffer = inward.view[start:]
        self.protocol = StreamProtocol(settings, inward.view[:remote_sgl])
        self.sender = StreamSender(
            self.protocol,
            self.sends,
            self._callbacks,
            outward,
            options.max_inline,
            is_iwarp=self.is_iwarp,
        )

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive."""
        qp = self._resources.make_qp(self._receives, self.sends)
        self.busy.open(self._resources.send_cq)
        self._resources.watch(qp, self._callbacks.queue_pair_event)
        return qp

    @property
    def pd(self) -> ProtectionDomain:
        """Where registered memory must be registered."""
        return self._resources.loop_device.pd

    # --- in ---

    def read(self, limit: int) -> bytes:
        """Up to `limit` of the bytes that have come; b"" if there are none."""
        start, length = self.protocol.inbound.readable(limit)
        data = bytes(self._buffer[start : start + length])
        self._consumed(length)
        return data

    def read_into(self, memory: memoryview) -> int:
        """Fill `memory`, of bytes, as far as bytes have come: how many there were."""
        filled = 0
        while length := (readable := self.protocol.inbound.readable(len(memory) - filled))[1]:
            start = readable[0]
            memory[filled : filled + length] = self._buffer[start : start + length]
            filled += length
            self._consumed(length)
        return filled

    def _consumed(self, nbytes: int) -> None:
        self.protocol.inbound.consume(nbytes)
        if self.protocol.inbound.has_update:
            self.sender.post_controls()

    @property
    def receives_posted(self) -> int:
        """Receives that the device has not ended yet."""
        return self._receives.posted

    def complete(self, number: int, wc: IbvWc) -> None:
        """Take a completion from the dispatcher."""
        if number & RECEIVE:
            self._receives.completed()
            self._received(number & NUMBER_MASK, wc)
        else:
            self.sends.completed(number)
            if wc.status != SUCCESS:
                self._callbacks.request_failed(WcOpcode.RDMA_WRITE, wc)
            self._callbacks.request_completed()
        self.sender.post_controls()
        self._on_change()

    def _received(self, slot: int, wc: IbvWc) -> None:
        if wc.status != SUCCESS:
            self._callbacks.request_failed(WcOpcode.RECV, wc)
            return
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

    # --- what the endpoint says ---

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made."""
        self._may_read = initiator_depth > 0

    def resume(self) -> None:
        """The peer is ready for the first requests, if they were held back."""
        self.sends.resume()
        self.sender.post_controls()
        self._on_change()

    def probe(self) -> None:
        """Have the peer's device say something, if reads were negotiated."""
        try:
            if self._may_read:
                self.sends.probe(None)
        except VerbsError as error:
            self._callbacks.post_failed(error)

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._on_change()

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""
        self._resources.drain(then)

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._callbacks.device_failed(error)

    def stop(self) -> None:
        """Nothing will be received any more."""
        self._receives.stop()

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.sends.abandon()
        self._resources.release()
