"""StreamProtocol: rsocket's protocol as a state machine that does no I/O.

In go the peer's connection data and its messages; out come requests to post, in order, and numbers:
where in the receive buffer the next bytes are, and where in the peer's memory the next ones may be
written. Who drives it owns the memory, posts what it says, and tells it what has ended.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from aiordma.errors import ProtocolError
from aiordma.streams.inbound import Inbound
from aiordma.streams.outbound import Outbound
from aiordma.streams.states import StreamEvent, StreamState, move
from aiordma.streams.wire import (
    MAPPING_SIZE,
    MAX_TRANSFER,
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    ConnectionData,
    Control,
    Mapping,
    Op,
    Segment,
    pack_mapping,
    pack_message,
    pack_segment,
    unpack_message,
)

# Messages that no credits count, of which so many may be posted and not done at once.
MAX_CONTROLS = 4
# So many of them may be done, and wait for a peer that does not look: one for each half of the
# credits and of the buffer that it had, SHUTDOWN and DISCONNECT. Its receives, or on RoCE its
# device's patience, must do for them on top of its credits.
RESERVED_RECEIVES = 6

_DATA, _CREDIT, _IOMAP, _CONTROL = Op.DATA, Op.CREDIT, Op.IOMAP, Op.CONTROL


class OutgoingMessage(NamedTuple):
    """A message to post, behind or beside a write of `payload` to `target` in the peer's memory."""

    message: int
    payload: bytes = b""
    target: Segment = Segment(0, 0, 0)


class Settings(NamedTuple):
    """How this side takes part."""

    messages: int
    """Receives that are posted: so many messages may be on their way here."""
    remote_sgl: Segment
    """Memory that the peer writes its targets and mappings to; see board_size()."""
    buffer: Segment
    """The receive buffer, which the peer writes data to."""
    byte_order: ByteOrder
    """This machine's."""
    sends_messages: bool
    """Whether messages travel alone, behind writes, as on iWARP; else beside them."""
    mappings: int = 0
    """Mappings that the peer may announce."""


def remote_sgl_size(mappings: int) -> int:
    """Bytes that targets and so many mappings take."""
    return TARGETS * SEGMENT_SIZE + mappings * MAPPING_SIZE


class StreamProtocol:
    """One side of a stream. Nothing here waits, calls C or looks at a clock."""

    def __init__(self, settings: Settings, remote_sgl: memoryview) -> None:
        """`remote_sgl` is the memory of `settings.board`; what the peer writes appears there."""
        # RoCE's devices wait for a receive; iWARP's end the connection if there is none.
        self._reserve = RESERVED_RECEIVES if settings.sends_messages else 0
        self._settings = settings
        self.inbound = Inbound(settings.buffer, settings.messages - self._reserve)
        self.outbound = Outbound(remote_sgl, settings.byte_order, self._reserve)
        self.state = StreamState.OPEN
        self.has_left = False
        """Whether this side has left: nothing is received any more."""
        self.peer_finished = False
        """Whether the peer has said that it sends nothing any more."""
        self.peer_left = False
        """Whether it has said that it does not receive either."""
        self._control_credits = MAX_CONTROLS
        self._queued_controls: deque[Control] = deque()
        self._peer: ConnectionData | None = None
        self._early: list[int] = []
        self._next_peer_target = 1
        # Immediate data has a byte order of its own; a message that travels alone has its sender's.
        self._swaps = False

    # --- the beginning ---

    def connection_data(self) -> bytes:
        """What to send along when connecting, or accepting."""
        settings = self._settings
        return ConnectionData(
            settings.messages - self._reserve,
            settings.remote_sgl._replace(length=TARGETS),
            self.inbound.first_buffer,
            settings.byte_order,
            settings.mappings,
        ).pack()

    def start(self, data: bytes) -> None:
        """Take the peer's. Messages may have come before.

        Raises:
            ProtocolError: the peer speaks another protocol, or nonsense.
        """
        settings, peer = self._settings, ConnectionData.unpack(data)
        self._peer = peer
        self._swaps = settings.sends_messages and peer.byte_order != settings.byte_order
        self.outbound.start(peer.credits, peer.buffer)
        early, self._early = self._early, []
        for message in early:
            self.received(message)

    # --- what the peer says ---

    def received(self, message: int) -> None:
        """A message came.

        Raises:
            ProtocolError: it makes no sense.
        """
        if self._peer is None:
            self._early.append(message)
            return
        op, value = unpack_message(_swapped(message) if self._swaps else message)
        if op == _DATA:
            if self.peer_finished:
                raise ProtocolError("the peer sent data after it said that it had no more")
            if not self.has_left:
                self.inbound.arrived(value)
        elif op == _CREDIT:
            self.outbound.update_credits(value)
        elif op == _CONTROL:
            self._control_received(value)
        elif op == _IOMAP:
            self.inbound.count_message()
            self.outbound.mapped(value & 0xFFFF)
        else:
            raise ProtocolError(f"the peer sent {message:#010x}, which is no message of rsocket's")

    def _control_received(self, control: int) -> None:
        if control == Control.SHUTDOWN:
            self.peer_finished = True
            self._move(StreamEvent.PEER_FINISHED)
        elif control == Control.DISCONNECT:
            self.peer_finished = self.peer_left = True
            self._move(StreamEvent.PEER_LEFT)
        elif control != Control.KEEPALIVE:
            raise ProtocolError(f"the peer sent control message {control}: rsocket has no such one")

    # --- what this side wants ---

    def finish(self) -> None:
        """No more data will be sent. Idempotent."""
        self._move(StreamEvent.FINISH)

    def leave(self) -> None:
        """No more data will be sent or received. Idempotent."""
        self.has_left = True
        self._move(StreamEvent.LEAVE)

    def connection_lost(self) -> None:
        """The connection has ended. Idempotent."""
        self._queued_controls.clear()
        self._move(StreamEvent.LOST)

    def _move(self, event: StreamEvent) -> None:
        self.state, word = move(self.state, event)
        if word is not None:
            self._queued_controls.append(word)

    # --- data ---

    @property
    def room(self) -> int:
        """Bytes that may be sent with one message now."""
        return min(self.outbound.room, MAX_TRANSFER) if self.state.may_send else 0

    def send(self, nbytes: int) -> OutgoingMessage:
        """Send so many bytes, from 1 to `room`: the payload is for the caller to fill in."""
        return OutgoingMessage(pack_message(_DATA, nbytes), b"", self.outbound.send(nbytes))

    @property
    def peer_mappings(self) -> int:
        """How many mappings may be announced to the peer, each once.

        rsocket never gives back the credits that they take, so that they must leave some.
        """
        peer = self._peer
        return 0 if peer is None else min(peer.mappings, peer.credits // 4)

    def announce(self, index: int, mapping: Mapping) -> OutgoingMessage:
        """Let the peer write to memory of this side's at offsets. Takes a credit.

        Raises:
            ProtocolError: the peer has no place for it.
        """
        peer = self._peer
        if peer is None or index >= peer.mappings:
            raise ProtocolError(f"the peer has no place for mapping {index}")
        self.outbound.spend_credit()
        at = peer.targets.addr + peer.targets.length * SEGMENT_SIZE + index * MAPPING_SIZE
        return OutgoingMessage(
            pack_message(_IOMAP, index),
            pack_mapping(mapping, peer.byte_order),
            Segment(at, peer.targets.key, MAPPING_SIZE),
        )

    # --- what is to be said ---

    def next_request(self) -> OutgoingMessage | None:
        """What is to be posted next, apart from data, if anything, and if it may be now.

        Each ends with a call of ended().
        """
        if not self._control_credits:
            return None
        if self._has_update():
            self._control_credits -= 1
            return self._credit_update()
        if self._queued_controls:
            self._control_credits -= 1
            return OutgoingMessage(pack_message(_CONTROL, self._queued_controls.popleft()))
        return None

    def _has_update(self) -> bool:
        return self.inbound.has_update and self.state.may_receive and self._peer is not None

    def _credit_update(self) -> OutgoingMessage:
        peer = self._peer
        assert peer is not None
        total, buffer = self.inbound.take_update()
        message = pack_message(_CREDIT, total)
        if buffer is None:
            return OutgoingMessage(message)
        at = peer.targets.addr + self._next_peer_target * SEGMENT_SIZE
        self._next_peer_target = (self._next_peer_target + 1) % peer.targets.length
        target = Segment(at, peer.targets.key, SEGMENT_SIZE)
        return OutgoingMessage(message, pack_segment(buffer, peer.byte_order), target)

    def control_completed(self) -> None:
        """The device has done one that next_request() gave."""
        self._control_credits += 1

    @property
    def all_controls_completed(self) -> bool:
        """Whether every word was posted, and done."""
        return not self._queued_controls and self._control_credits == MAX_CONTROLS


def _swapped(message: int) -> int:
    return int.from_bytes(message.to_bytes(4, "little"), "big")
