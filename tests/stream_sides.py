"""One side of a byte stream without devices. The test acts as the peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiordma.streams import wire
from aiordma.streams.protocol import OutgoingMessage, Settings, StreamProtocol, target_sgl_size
from aiordma.streams.wire import ByteOrder, ConnectionData, Control, Op, Segment

ORDERS: list[ByteOrder] = ["little", "big"]
BUFFER, BUFFER_KEY = 0x10000, 11
TARGET_SGL, TARGET_SGL_KEY = 0x7F00_0000_0000, 22
HALVES = [Segment(BUFFER, BUFFER_KEY, 32), Segment(BUFFER + 32, BUFFER_KEY, 32)]
"""The halves of a receive buffer of 64 bytes."""


def contains(outer: Segment, inner: Segment) -> bool:
    """Return True if a write to `inner` stays within `outer` and uses its key."""
    end = inner.addr + inner.length
    return outer.key == inner.key and outer.addr <= inner.addr and end <= outer.addr + outer.length


def settings(
    buffer: int = 64,
    messages: int = 16,
    byte_order: ByteOrder = "little",
    sends_messages: bool = False,
    mappings: int = 0,
) -> Settings:
    sgl = Segment(TARGET_SGL, TARGET_SGL_KEY, target_sgl_size(mappings))
    memory = Segment(BUFFER, BUFFER_KEY, buffer)
    return Settings(messages, sgl, memory, byte_order, sends_messages, mappings)


class Script:
    """A StreamProtocol and its memory. The connection data of its peer has the values `peer`."""

    def __init__(self, own: Settings, **peer: Any) -> None:
        self.settings = own
        targets, buffer = Segment(0x5000, 55, wire.TARGETS), Segment(0x6000, 66, 100)
        self.peer = replace(ConnectionData(8, targets, buffer, own.byte_order), **peer)
        self.sgl_memory = bytearray(own.target_sgl.length)
        self.protocol = StreamProtocol(own, memoryview(self.sgl_memory))

    def start(self) -> Script:
        self.protocol.start(self.peer.pack())
        return self

    def receive(self, op: Op, value: int) -> None:
        self.protocol.received(wire.pack_message(op, value))

    def receive_control(self, control: Control) -> None:
        self.receive(Op.CONTROL, control)

    def receive_target(self, entry: int, *target: int, credits_: int = 8) -> None:
        """Write an entry of the target SGL and send credits, as the peer does."""
        self.write_target(entry, *target)
        self.receive(Op.CREDIT, credits_)

    def write_target(self, entry: int, *target: int) -> None:
        packed = wire.pack_segment(Segment(*target), self.settings.byte_order)
        self.sgl_memory[entry * wire.SEGMENT_SIZE : (entry + 1) * wire.SEGMENT_SIZE] = packed

    def posted(self) -> list[OutgoingMessage]:
        """Return all control messages to post. Each completes at once."""
        requests = []
        while request := self.protocol.next_control_message():
            requests.append(request)
            self.protocol.control_completed()
        return requests

    def posted_controls(self) -> list[int]:
        """Return the values of those of posted() that are of Op.CONTROL."""
        messages = [wire.unpack_message(request.message) for request in self.posted()]
        return [value for op, value in messages if op == Op.CONTROL]

    def consume(self, nbytes: int, message_size: int = 1 << 29) -> None:
        """Receive and read `nbytes`, in messages of `message_size`."""
        for start in range(0, nbytes, message_size):
            size = min(message_size, nbytes - start)
            self.receive(Op.DATA, size)
            self.protocol.inbound.consume(size)

    def send_all(self, limit: int = 1 << 29) -> list[Segment]:
        """Send messages of at most `limit` bytes while the peer has room. Return their targets."""
        targets = []
        while room := self.protocol.room:
            targets.append(self.protocol.send(min(room, limit)).target)
        return targets


def started(**options: Any) -> Script:
    """Return a Script that has announced its second half."""
    script = Script(settings(**options)).start()
    assert len(script.posted()) == 1
    return script
