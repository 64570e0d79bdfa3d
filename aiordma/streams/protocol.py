"""StreamProtocol: the rsocket protocol as a state machine that does no I/O.

Its input is the peer's connection data and messages. Its output is the messages to post, in order,
and two addresses: where the next bytes to read are in the receive buffer, and where the next bytes
may be written in the peer's memory. The caller owns the memory, posts the messages, and calls
control_completed() when the device has completed a control message.

Control messages are all messages that carry no data and use no credit: credit updates (Op.CREDIT)
and the messages of Op.CONTROL.
"""

from __future__ import annotations

from typing import NamedTuple

from aiordma.errors import ProtocolError
from aiordma.streams.inbound import Inbound
from aiordma.streams.outbound import MAX_CONTROLS, Outbound
from aiordma.streams.states import StreamEvent, StreamState, transition
from aiordma.streams.wire import (
    MAPPING_SIZE,
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
    unpack_message,
)

# The number of control messages that can be completed here before the peer takes its completions:
# one for each half of the peer's credits, one for each half of the peer's buffer, SHUTDOWN and
# DISCONNECT. On iWARP the peer needs receives for them in addition to the credits that it grants.
# On InfiniBand and RoCE its device answers receiver-not-ready, and the message is repeated.
RESERVED_RECEIVES = 6

_DATA, _CREDIT, _IOMAP, _CONTROL = Op.DATA, Op.CREDIT, Op.IOMAP, Op.CONTROL


class OutgoingMessage(NamedTuple):
    """A message to post, with or behind a write of `payload` to `target` in the peer's memory."""

    message: int
    payload: bytes = b""
    target: Segment = Segment(0, 0, 0)


class Settings(NamedTuple):
    """The settings of this side of a stream."""

    messages: int
    """The number of posted receives. It bounds the messages in flight to this side."""
    target_sgl: Segment
    """The memory that the peer writes its targets and mappings to; see target_sgl_size()."""
    buffer: Segment
    """The receive buffer: the memory that the peer writes data to."""
    byte_order: ByteOrder
    """The byte order of this machine."""
    sends_messages: bool
    """True if a message is a send of its own behind a write, as on iWARP. False if it is the
    immediate data of the write."""
    mappings: int = 0
    """The number of mappings (iomap) that the peer may announce."""


def target_sgl_size(mappings: int) -> int:
    """Return the size in bytes of the targets and of `mappings` mappings."""
    return TARGETS * SEGMENT_SIZE + mappings * MAPPING_SIZE


class StreamProtocol:
    """One side of a stream. It never waits, calls no C and reads no clock."""

    def __init__(self, settings: Settings, target_sgl: memoryview) -> None:
        """Use `target_sgl`, the memory of `settings.target_sgl`, which the peer writes to."""
        # If no receive is posted, RoCE repeats the message, but iWARP ends the connection.
        self._reserve = RESERVED_RECEIVES if settings.sends_messages else 0
        self._settings = settings
        self.inbound = Inbound(settings.buffer, settings.messages - self._reserve)
        self.outbound = Outbound(target_sgl, settings.byte_order, self._reserve)
        self.state = StreamState.OPEN
        self.has_left = False
        """True if this side has left: it takes no data any more."""
        self.peer_finished = False
        """True if the peer has announced that it sends no more data."""
        self.peer_left = False
        """True if the peer has announced that it neither sends nor receives any more."""
        self._queued_controls: list[Control] = []
        self._peer: ConnectionData | None = None
        # Messages that were received before the peer's connection data.
        self._early: list[int] = []
        self.swaps = False
        """True if the peer's messages have the other byte order. Immediate data has the network
        byte order, a message in a send the order of its sender."""

    # --- connecting ---

    def connection_data(self) -> bytes:
        """Return the private data to send when connecting or accepting."""
        settings = self._settings
        return ConnectionData(
            settings.messages - self._reserve,
            settings.target_sgl._replace(length=TARGETS),
            self.inbound.first_buffer,
            settings.byte_order,
            settings.mappings,
        ).pack()

    def start(self, data: bytes) -> None:
        """Take the peer's connection data. Messages can have been received before it.

        Raises:
            ProtocolError: `data`, or a message received before it, is not valid in the protocol.
        """
        settings, peer = self._settings, ConnectionData.unpack(data)
        self._peer = peer
        self.swaps = settings.sends_messages and peer.byte_order != settings.byte_order
        self.outbound.start(peer.credits, peer.buffer)
        self.inbound.start(*peer.targets, peer.byte_order == "big")
        self._state_changed()
        early, self._early = self._early, []
        for message in early:
            self.received(message)

    # --- messages of the peer ---

    def received(self, message: int) -> None:
        """Process a message of the peer.

        Raises:
            ProtocolError: the message breaks the rules of the protocol.
        """
        if self._peer is None:
            self._early.append(message)
            return
        op, value = unpack_message(_swapped(message) if self.swaps else message)
        if op == _DATA:
            if self.peer_finished:
                raise ProtocolError("the peer sent data after SHUTDOWN or DISCONNECT")
            if not self.has_left:
                self.inbound.data_received(value)
        elif op == _CREDIT:
            self.outbound.update_credits(value)
        elif op == _CONTROL:
            self._control_received(value)
        elif op == _IOMAP:
            self.inbound.count_message()
            self.outbound.mapping_received(value & 0xFFFF)
        else:
            raise ProtocolError(f"the peer sent {message:#010x}, which is no rsocket message")

    def _control_received(self, control: int) -> None:
        if control == Control.SHUTDOWN:
            self.peer_finished = True
            self._transition(StreamEvent.PEER_FINISHED)
        elif control == Control.DISCONNECT:
            self.peer_finished = self.peer_left = True
            self._transition(StreamEvent.PEER_LEFT)
        elif control != Control.KEEPALIVE:
            raise ProtocolError(
                f"the peer sent control message {control}, which rsocket does not have"
            )

    # --- the end ---

    def finish(self) -> None:
        """Finish sending: this side sends no more data. Idempotent."""
        self._transition(StreamEvent.FINISH)

    def leave(self) -> None:
        """Leave: this side neither sends nor receives any more. Idempotent."""
        self.has_left = True
        self._transition(StreamEvent.LEAVE)

    def keep_alive(self) -> None:
        """Queue KEEPALIVE, unless control messages are queued or this side has left."""
        if not (self._queued_controls or self.has_left):
            self._queued_controls.append(Control.KEEPALIVE)

    def connection_lost(self) -> None:
        """End the stream because its connection has ended. Idempotent.

        The queued control messages are dropped.
        """
        self._queued_controls.clear()
        self._transition(StreamEvent.LOST)

    def _transition(self, event: StreamEvent) -> None:
        self.state, control = transition(self.state, event)
        if control is not None:
            self._queued_controls.append(control)
        self._state_changed()

    def _state_changed(self) -> None:
        is_connected = self._peer is not None
        self.outbound.may_send = is_connected and self.state.may_send
        self.inbound.may_update = is_connected and self.state.may_receive
        self.inbound.takes_data = is_connected and not (self.peer_finished or self.has_left)

    # --- data ---

    @property
    def room(self) -> int:
        """Bytes that may be sent with one message now; 0 if no data can be sent."""
        return self.outbound.room

    def send(self, nbytes: int) -> OutgoingMessage:
        """Return the message for `nbytes` of data, 1 to `room`. The caller adds the payload."""
        return OutgoingMessage(pack_message(_DATA, nbytes), b"", self.outbound.send(nbytes))

    @property
    def peer_mappings(self) -> int:
        """The number of mappings that may be announced to the peer, each once.

        rsocket never returns the credits that they use. So they may use only some of the credits.
        """
        peer = self._peer
        return 0 if peer is None else min(peer.mappings, peer.credits // 4)

    def announce(self, index: int, mapping: Mapping) -> OutgoingMessage:
        """Return the message that announces memory of this side to the peer. Uses a credit.

        Raises:
            ProtocolError: the iomap list of the peer has no such index.
        """
        peer = self._peer
        if peer is None or index >= peer.mappings:
            raise ProtocolError(f"the iomap list of the peer has no entry for mapping {index}")
        at = peer.targets.addr + peer.targets.length * SEGMENT_SIZE + index * MAPPING_SIZE
        request = OutgoingMessage(
            pack_message(_IOMAP, index),
            pack_mapping(mapping, peer.byte_order),
            Segment(at, peer.targets.key, MAPPING_SIZE),
        )
        self.outbound.spend_credit()
        return request

    # --- control messages ---

    def next_control_message(self) -> OutgoingMessage | None:
        """Return the next control message to post; None if there is none, or none may be posted.

        The caller calls control_completed() when the device has completed it.
        """
        inbound = self.inbound
        has_update = inbound.may_update and inbound.has_update
        if not (has_update or self._queued_controls) or not self.outbound.take_control_credit():
            return None
        if has_update:
            message, payload, target = inbound.take_update()
            return OutgoingMessage(message, payload, Segment(*target))
        return OutgoingMessage(pack_message(_CONTROL, self._queued_controls.pop(0)))

    @property
    def has_queued_controls(self) -> bool:
        """True if control messages wait to be posted, apart from credit updates."""
        return bool(self._queued_controls)

    def control_completed(self) -> None:
        """Count a message of next_control_message() as completed by the device."""
        self.outbound.control_completed()

    @property
    def all_controls_completed(self) -> bool:
        """True if all control messages were posted and have completed."""
        return not self._queued_controls and self.outbound.control_credits == MAX_CONTROLS


def _swapped(message: int) -> int:
    return int.from_bytes(message.to_bytes(4), "little")
