"""StreamSender: posts the data and the control messages of a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiordma.enums import WrOpcode
from aiordma.errors import RdmaError, VerbsError
from aiordma.memory import MemoryPart, MemorySlice
from aiordma.qp import EndpointCallbacks, SendQueue
from aiordma.qp.send_queue import InFlightMemory
from aiordma.streams.options import MESSAGE_SIZE
from aiordma.streams.outbound import MAX_CONTROLS
from aiordma.streams.protocol import OutgoingMessage, StreamProtocol
from aiordma.streams.wire import Mapping, Segment
from aiordma.verbs import QueuePair
from aiordma.verbs.queue_pair import NO_IMMEDIATE

if TYPE_CHECKING:
    from aiordma._native import fast_path

# The most bytes of one request of write_mapped().
MAX_CHUNK = 1 << 16


class StreamSender:
    """The sending side of one stream. It never waits: it takes only data that it can post now.

    StreamDataPathCore posts data that is copied, and credit updates. This class posts the rest.
    """

    def __init__(
        self,
        protocol: StreamProtocol,
        core: fast_path.StreamDataPathCore,
        sends: SendQueue,
        callbacks: EndpointCallbacks,
        memory: MemoryPart,
        ring: fast_path.SendRing,
        *,
        is_iwarp: bool,
    ) -> None:
        """Copy data to `memory`, as `ring` divides it.

        On iWARP each message needs a work request of its own.
        """
        self._protocol = protocol
        self._core = core
        self._sends = sends
        self._callbacks = callbacks
        self._memory = memory
        self._ring = ring
        self._is_iwarp = is_iwarp
        self._requests_per_message = 1 + is_iwarp
        # Data leaves send credits for the control messages.
        self._reserved_credits = self._requests_per_message * MAX_CONTROLS

    @property
    def room(self) -> int:
        """Bytes of registered memory that may be written with one request now; 0 if none."""
        return self._core.room

    @property
    def _has_credits(self) -> bool:
        return self._sends.credits >= self._reserved_credits + self._requests_per_message

    def write(self, data: memoryview) -> int:
        """Post the part of `data` that may be posted now, and return its length in bytes.

        The caller can reuse `data` at once.

        Raises:
            RdmaError: posting failed, which ends the connection.
        """
        posted = self._core.write(data)
        if posted < 0:
            raise self.post_error(posted)
        return posted

    def post_error(self, posted: int) -> RdmaError:
        """End the connection for a negative errno of the core. Return the exception to raise."""
        return self._callbacks.post_failed(VerbsError(-posted, "ibv_post_send"))

    def write_registered(self, part: MemorySlice, memory: InFlightMemory) -> None:
        """Post registered memory of at most `room` bytes, without a copy.

        `memory` is released when the request has completed.

        Raises:
            RdmaError: posting failed, which ends the connection.
        """
        segments = [(part.addr, len(part), part.lkey)]

        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            opcode = WrOpcode.RDMA_WRITE if imm == NO_IMMEDIATE else WrOpcode.RDMA_WRITE_WITH_IMM
            qp.post_list(wr_id, opcode, segments, target, flags=flags, imm=imm)

        self._post(post, self._protocol.send(len(part)), memory)

    @property
    def may_announce(self) -> bool:
        """True if announce() may be called now."""
        return self._has_credits and self._protocol.outbound.credits > 0

    def announce(self, index: int, mapping: Mapping) -> None:
        """Announce a mapping of memory of this side to the peer.

        Raises:
            RdmaError: posting failed, which ends the connection.
        """
        request = self._protocol.announce(index, mapping)
        self._post(self._inline(request.payload), request)

    @property
    def may_write_mapped(self) -> bool:
        """True if write_mapped() can copy data now."""
        return bool(self._has_credits and self._ring.free)

    def write_mapped(self, data: memoryview, target: Segment) -> int:
        """Post the part of `data` that may be posted now, to memory that the peer has mapped.

        Return its length in bytes.

        Raises:
            RdmaError: posting failed, which ends the connection.
        """
        taken = 0
        while taken < len(data) and self.may_write_mapped:
            start, length = self._ring.reserve(min(len(data) - taken, MAX_CHUNK))
            chunk, at = data[taken : taken + length], (target.addr + taken, target.key)
            write = partial(self._copied(chunk, start), target=at, imm=NO_IMMEDIATE)
            try:
                self._post_one(write, _RingSpace(self._ring, length))
            except VerbsError as error:
                raise self._callbacks.post_failed(error) from None
            taken += length
        return taken

    def _inline(self, data: bytes | memoryview) -> Write:
        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            qp.post_write_inline(wr_id, data, target, imm, flags)

        return post

    def _copied(self, data: memoryview, start: int) -> Write:
        local = self._memory.address + start, self._memory.lkey

        def post(qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int) -> None:
            qp.post_write_copy(wr_id, local, data, target, imm, flags)

        return post

    def _post(
        self, write: Write, request: OutgoingMessage, memory: InFlightMemory | None = None
    ) -> None:
        """Post a write, and its message as immediate data or as a send behind it."""
        message = request.message
        target = request.target.addr, request.target.key
        try:
            if not self._is_iwarp:
                self._post_one(lambda qp, wr, flags: write(qp, wr, flags, target, message), memory)
                return
            if request.target.length:
                self._post_one(
                    lambda qp, wr, flags: write(qp, wr, flags, target, NO_IMMEDIATE),
                    memory,
                    is_last=False,
                )
            data = message.to_bytes(MESSAGE_SIZE, sys.byteorder)
            self._post_one(lambda qp, wr, flags: qp.post_send_inline(wr, data, flags=flags), memory)
        except VerbsError as error:
            raise self._callbacks.post_failed(error) from None

    def _post_one(
        self, post: Post, memory: InFlightMemory | None = None, *, is_last: bool = True
    ) -> None:
        """Post a request. `memory` is released when the last request of a message has completed."""
        sends = self._sends
        has_credit = sends.try_reserve()
        assert has_credit, "the caller has checked the credits"
        number = sends.posted
        try:
            if memory is not None and is_last:
                sends.post(post, memory)
            else:
                sends.post_without_memory(post)
        except BaseException:
            # After a Ctrl-C the request can be in flight: its completion releases both.
            if number == sends.posted:
                sends.unreserve()
                if memory is not None:  # libsiw keeps a request that it reports as failed
                    sends.keep_until_destroyed(memory)
            raise

    def post_controls(self) -> None:
        """Post the control messages of the protocol, as far as there are send credits."""
        protocol = self._protocol
        if self._callbacks.released:  # these are the last completions, nothing can be posted
            return
        try:
            while self._sends.credits >= self._requests_per_message:
                request = protocol.next_control_message()
                if request is None:
                    return
                self._post(self._inline(request.payload), request, _ControlInFlight(protocol))
        except RdmaError:
            return  # the callbacks have reported the error already
        finally:
            if protocol.has_queued_controls:
                self._core.notify_sendable = True


Post = Callable[[QueuePair, int, int], None]


class Write(Protocol):
    """A function that posts a write to a target (address and key), with immediate data `imm`."""

    def __call__(
        self, qp: QueuePair, wr_id: int, flags: int, target: tuple[int, int], imm: int
    ) -> None: ...


class _RingSpace:
    """A part of the send ring that is in use until its work request has completed."""

    __slots__ = ("_nbytes", "_ring")

    def __init__(self, ring: fast_path.SendRing, nbytes: int) -> None:
        self._ring = ring
        self._nbytes = nbytes

    def release(self) -> None:
        self._ring.release(self._nbytes)


class _ControlInFlight:
    """A control message that is posted and not completed."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: StreamProtocol) -> None:
        self._protocol = protocol

    def release(self) -> None:
        self._protocol.control_completed()
