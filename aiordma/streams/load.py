"""StreamLoad: a stream as what a queue pair carries. It posts what the protocol says.

Data is copied into a ring of registered memory, unless it is registered already or travels inside
the request, and written from there into the peer's receive buffer. On RoCE a message travels beside
the write, as immediate data; iWARP has no such thing, and a send of 4 bytes follows each write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiordma.cm import AsyncCmId
from aiordma.datapath import NUMBER_MASK, RECEIVE, Berth, Owner, ReceiveRing, SendQueue
from aiordma.datapath.send_queue import Lent
from aiordma.dispatch import BusyPoll
from aiordma.enums import AccessFlags, WcOpcode, WcStatus, WrOpcode
from aiordma.errors import ProtocolError, RdmaError, VerbsError
from aiordma.memory import AllocatedRegion, MemorySlice
from aiordma.streams.options import MESSAGE_SIZE, StreamOptions
from aiordma.streams.protocol import CONTROLS, Request, Settings, StreamProtocol, board_size
from aiordma.streams.send_ring import SendRing
from aiordma.streams.wire import MAPPING_SIZE, Mapping, Segment
from aiordma.verbs import ProtectionDomain, QueuePair, QueuePairCaps
from aiordma.verbs.completion import immediate
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma._native._lib import IbvWc

SUCCESS = int(WcStatus.SUCCESS)
# No larger in one request, so that the peer has something to read while the rest is copied.
MAX_CHUNK = 1 << 16
CACHE_LINE = 64


class StreamLoad:
    """The memory and the queues of one stream. On the loop's thread but for what says otherwise."""

    def __init__(
        self, cm: AsyncCmId, owner: Owner, options: StreamOptions, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called whenever something may have become possible, or impossible."""
        device = cm.device()
        self.is_iwarp = device.is_iwarp
        self._cm = cm
        self._owner = owner
        self._options = options
        self._on_change = on_change
        self._berth = Berth(
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
        self.busy = BusyPoll(self._berth.shared, options.busy_poll)
        self.sends = SendQueue(cm.loop, options.send_depth, selective=not device.is_iwarp)
        self.counts_flushes = not device.is_iwarp
        self.ran_dry = False  # the peer has fewer credits than there are receives
        # A write and the send behind it.
        self._cost = 1 + device.is_iwarp
        self._kept_free = self._cost * CONTROLS
        self._receives = ReceiveRing(options.recv_depth, MESSAGE_SIZE)
        self._ring = SendRing(options.send_buffer)
        self._inward: AllocatedRegion
        self._buffer: memoryview
        self._outward: AllocatedRegion
        self.protocol: StreamProtocol

    # --- the beginning: in a worker thread ---

    def allocate(self) -> None:
        """Pin the memory, after which there is a protocol.

        Raises:
            VerbsError: ENOMEM when the locked-memory limit is reached.
        """
        options, handle = self._options, self._cm.handle
        pd = self._berth.open().pd
        board = board_size(options.mappings)
        # Each begins where a cache line does: a device writes the entries of the board at one go.
        start = -(-board // CACHE_LINE) * CACHE_LINE
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        self._inward = inward = AllocatedRegion(pd, start + options.recv_buffer, access)
        handle.on_destroyed(inward.close)
        self._outward = AllocatedRegion(pd, options.send_buffer, AccessFlags.LOCAL_WRITE)
        handle.on_destroyed(self._outward.close)
        settings = Settings(
            options.recv_depth,
            Segment(inward.address, inward.rkey, board),
            Segment(inward.address + start, inward.rkey, options.recv_buffer),
            sys.byteorder,
            self.is_iwarp,
            options.mappings,
        )
        self._buffer = inward.view[start:]
        self.protocol = StreamProtocol(settings, inward.view[:board])

    def prepare(self) -> QueuePair:
        """Make the queue pair, and get everything ready to receive."""
        qp = self._berth.make_qp(self._receives, self.sends)
        self.busy.open(self._berth.queue)
        self._berth.watch(qp, self._owner.queue_pair_event)
        return qp

    # --- out ---

    @property
    def pd(self) -> ProtectionDomain:
        """Where registered memory must be registered."""
        return self._berth.shared.pd

    @property
    def may_copy(self) -> bool:
        """Whether write() would take anything."""
        return bool(self._ring.free and self.room)

    @property
    def room(self) -> int:
        """Bytes of registered memory that may be written with one request now."""
        return self.protocol.room if self._has_places else 0

    @property
    def _has_places(self) -> bool:
        return self.sends.places >= self._kept_free + self._cost

    def write(self, data: memoryview) -> int:
        """Post as much of `data`, bytes, as may be now: how many were taken. It may be reused.

        Raises:
            RdmaError: the device refused, which ends the connection.
        """
        taken = 0
        while taken < len(data) and (room := self.room):
            chunk = data[taken : taken + min(room, MAX_CHUNK)]
            if len(chunk) <= self._options.max_inline:
                self._post(self._inline(chunk), self.protocol.send(len(chunk)))
            else:
                start, length = self._ring.take(len(chunk))
                if not length:
                    break
                chunk = chunk[:length]
                request = self.protocol.send(length)
                self._post(self._copied(chunk, start), request, _Place(self._ring, length))
            taken += len(chunk)
        return taken

    def write_registered(self, part: MemorySlice, lent: Lent) -> None:
        """Post registered memory of at most `room` bytes, without a copy. `lent` is released when
        the device is done with it.

        Raises:
            RdmaError: the device refused, which ends the connection.
        """
        segments = [(part.addr, len(part), part.lkey)]

        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            opcode = WrOpcode.RDMA_WRITE if imm == NO_IMMEDIATE else WrOpcode.RDMA_WRITE_WITH_IMM
            qp.post_list(wr_id, opcode, segments, target, flags=flags, imm=imm)

        self._post(post, self.protocol.send(len(part)), lent)

    @property
    def may_announce(self) -> bool:
        """Whether announce() may be called now."""
        return self._has_places and self.protocol.outbound.credits > 0

    def announce(self, index: int, mapping: Mapping) -> None:
        """Tell the peer of memory of this side's.

        Raises:
            RdmaError: the device refused, which ends the connection.
        """
        request = self.protocol.announce(index, mapping)
        self._post(self._inline(request.payload), request)

    @property
    def may_place(self) -> bool:
        """Whether place() would take anything."""
        return bool(self._has_places and self._ring.free)

    def place(self, data: memoryview, target: Segment) -> int:
        """Post as much of `data` as may be now, to memory that the peer has mapped: how many bytes.

        Raises:
            RdmaError: the device refused, which ends the connection.
        """
        taken = 0
        while taken < len(data) and self.may_place:
            start, length = self._ring.take(min(len(data) - taken, MAX_CHUNK))
            chunk, at = data[taken : taken + length], (target.addr + taken, target.key)
            write = partial(self._copied(chunk, start), target=at, imm=NO_IMMEDIATE)
            try:
                self._post_one(write, _Place(self._ring, length))
            except VerbsError as error:
                raise self._owner.not_posted(error) from None
            taken += length
        return taken

    def _inline(self, data: bytes | memoryview) -> Write:
        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            qp.post_write_inline(wr_id, data, target, imm, flags)

        return post

    def _copied(self, data: memoryview, start: int) -> Write:
        local = self._outward.address + start, self._outward.lkey

        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            qp.post_write_copy(wr_id, local, data, target, imm, flags)

        return post

    def _post(self, write: Write, request: Request, lent: Lent | None = None) -> None:
        """Post a write, and the message beside it or behind it."""
        message = request.message
        target = request.target.addr, request.target.key
        try:
            if not self.is_iwarp:
                self._post_one(lambda qp, wr, flags: write(qp, wr, flags, target, message), lent)
                return
            if request.target.length:
                self._post_one(lambda qp, wr, flags: write(qp, wr, flags, target, NO_IMMEDIATE))
            data = message.to_bytes(MESSAGE_SIZE, sys.byteorder)
            self._post_one(lambda qp, wr, flags: qp.post_send_inline(wr, data, flags=flags), lent)
        except VerbsError as error:
            raise self._owner.not_posted(error) from None

    def _post_one(self, post: Post, lent: Lent | None = None) -> None:
        sends = self.sends
        sends.try_reserve()
        try:
            if lent is None:
                sends.post_unlent(post)
            else:
                sends.post(post, lent)
        except BaseException:
            # libsiw keeps a request that it reports as failed.
            sends.unreserve()
            if lent is not None:
                sends.keep(lent)
            raise

    def pump(self) -> None:
        """Post what the protocol has to say, as far as there are places."""
        protocol = self.protocol
        try:
            while self.sends.places >= self._cost:
                request = protocol.next_request()
                if request is None:
                    return
                self._post(self._inline(request.payload), request, _Word(protocol))
        except RdmaError:
            return  # the owner knows

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
        if self.protocol.inbound.grants:
            self.pump()

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
                self._owner.request_failed(WcOpcode.RDMA_WRITE, wc)
            self._owner.request_ended()
        self.pump()
        self._on_change()

    def _received(self, slot: int, wc: IbvWc) -> None:
        if wc.status != SUCCESS:
            self._owner.request_failed(WcOpcode.RECV, wc)
            return
        message = immediate(wc)
        if message is None:
            data = self._receives.view(slot, wc.byte_len)
            message = int.from_bytes(data, sys.byteorder)
        try:
            self._receives.post(slot)
            self.protocol.received(message)
        except (ProtocolError, VerbsError) as error:
            self._owner.break_off(error)
            return
        self._owner.message_arrived()

    # --- what the endpoint says ---

    def negotiated(self, initiator_depth: int) -> None:
        """The connection is made."""

    def let_go(self) -> None:
        """The peer is ready for the first requests, if they were held back."""
        self.sends.let_go()
        self.pump()
        self._on_change()

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._on_change()

    def drain(self, then: Callable[[], None]) -> None:
        """Take all receives that have completed, then call `then`."""
        self._berth.drain(then)

    def device_failed(self, error: VerbsError) -> None:
        """The device is gone: no completion will come any more."""
        self._owner.device_failed(error)

    def stop(self) -> None:
        """Nothing will be received any more."""
        self._receives.stop()

    def release(self) -> None:
        """The queue pair is destroyed: let go of what is shared."""
        self.sends.abandon()
        self._berth.release()


Post = Callable[[QueuePair, int, int], None]


class Write(Protocol):
    """Posts a write, to the address and with the key of a target, with immediate data beside it."""

    def __call__(
        self, qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int
    ) -> None: ...


class _Place:
    """A place in the send ring, until the device is done with it."""

    __slots__ = ("_nbytes", "_ring")

    def __init__(self, ring: SendRing, nbytes: int) -> None:
        self._ring = ring
        self._nbytes = nbytes

    def release(self) -> None:
        self._ring.give_back(self._nbytes)


class _Word:
    """Something that the protocol had to say, until it is said."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: StreamProtocol) -> None:
        self._protocol = protocol

    def release(self) -> None:
        self._protocol.ended()
