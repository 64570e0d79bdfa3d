"""Two sides of a stream and the network between them: memory, keys, and requests in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from aiordma.streams.protocol import OutgoingMessage, Settings, StreamProtocol, target_sgl_size
from aiordma.streams.states import StreamState
from aiordma.streams.wire import (
    SEGMENT_SIZE,
    TARGETS,
    ByteOrder,
    ConnectionData,
    Control,
    Mapping,
    Op,
    Segment,
    pack_message,
    unpack_message,
    unpack_segment,
)

ORDERS: list[ByteOrder] = ["little", "big"]
BUFFER, BUFFER_KEY = 0x10000, 11
TARGET_SGL, TARGET_SGL_KEY = 0x7F00_0000_0000, 22
MAPPINGS = 3
USES_CREDIT = {Op.DATA, Op.IOMAP}


def contains(outer: Segment, inner: Segment) -> bool:
    """Return True if a write to `inner` stays within `outer` and uses its key."""
    return (
        outer.key == inner.key
        and outer.addr <= inner.addr
        and inner.addr + inner.length <= outer.addr + outer.length
    )


def settings(
    *,
    buffer: int = 64,
    messages: int = 16,
    byte_order: ByteOrder = "little",
    sends_messages: bool = False,
    mappings: int = 0,
) -> Settings:
    return Settings(
        messages,
        Segment(TARGET_SGL, TARGET_SGL_KEY, target_sgl_size(mappings)),
        Segment(BUFFER, BUFFER_KEY, buffer),
        byte_order,
        sends_messages,
        mappings,
    )


def sides(sends_messages: bool) -> st.SearchStrategy[Settings]:
    return st.builds(
        settings,
        buffer=st.integers(2, 100),
        messages=st.integers(8, 40),
        byte_order=st.sampled_from(ORDERS),
        sends_messages=st.just(sends_messages),
        mappings=st.just(MAPPINGS),
    )


class Side:
    """A StreamProtocol with memory. deliver() carries its requests to `peer`."""

    peer: Side

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sgl_memory = bytearray(settings.target_sgl.length)
        self.buffer = bytearray(settings.buffer.length)
        self.protocol = StreamProtocol(settings, memoryview(self.sgl_memory))
        self.announced = deque([self.protocol.inbound.first_buffer])
        self.mapped: dict[int, Mapping] = {}
        self.written = bytearray()
        self.received = bytearray()
        self.in_flight: deque[Callable[[], None]] = deque()
        self.completions: deque[Callable[[], None]] = deque()
        self.undelivered: list[Op] = []
        self.started = self.has_left = False

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.protocol.start(self.peer.connection_data() + bytes(20))
            self.post_controls()

    def connection_data(self) -> bytes:
        return self.protocol.connection_data()

    @property
    def state(self) -> StreamState:
        return self.protocol.state

    # --- calls of the application ---

    def write(self, data: bytes) -> int:
        """Send the part of `data` that may be sent with one message, and return its length."""
        data = data[: self.protocol.room]
        if data:
            request = self.protocol.send(len(data))
            self._check_data(request.target)
            self.written += data
            self._post(request, data)
        return len(data)

    def read(self, limit: int) -> bytes:
        inbound = self.protocol.inbound
        start, length = inbound.readable(limit)
        assert length <= limit
        data = bytes(self.buffer[start : start + length])
        assert len(data) == length
        inbound.consume(length)
        self.received += data
        self.post_controls()
        return data

    def announce(self, index: int, mapping: Mapping) -> None:
        self.mapped[index] = mapping
        request = self.protocol.announce(index, mapping)
        assert contains(self.peer.settings.target_sgl, request.target)
        self._post(request, request.payload)

    def finish(self) -> None:
        self.protocol.finish()
        self.post_controls()

    def leave(self) -> None:
        self.has_left = True
        self.protocol.leave()
        self.post_controls()

    def post_controls(self) -> None:
        while request := self.protocol.next_control_message():
            if request.payload:
                assert len(request.payload) == SEGMENT_SIZE
                assert contains(self.peer.settings.target_sgl, request.target)
                order = self.peer.settings.byte_order
                self.announced.append(unpack_segment(request.payload, order))
            self._post(request, request.payload, self.protocol.control_completed)

    # --- the devices ---

    def _check_data(self, target: Segment) -> None:
        announced = self.peer.announced
        first = announced[0]
        assert contains(first, target)
        assert first.addr == target.addr, "the peer reads in order"
        rest = first.length - target.length
        announced[0] = Segment(first.addr + target.length, first.key, rest)
        if not rest:
            announced.popleft()

    def _post(
        self, request: OutgoingMessage, payload: bytes, ended: Callable[[], None] | None = None
    ) -> None:
        assert len(payload) == request.target.length
        peer, target = self.peer, request.target
        message = self._message_for_peer(request.message)
        self.undelivered.append(Op(unpack_message(request.message)[0]))
        self._check_receives()
        if payload:
            half = len(payload) // 2
            first, second = payload[:half], payload[half:]
            rest = Segment(target.addr + half, target.key, len(second))
            self.in_flight.append(lambda: peer.store(target._replace(length=half), first))
            self.in_flight.append(lambda: peer.store(rest, second))
        self.in_flight.append(lambda: self._arrive(message))
        if ended is not None:
            self.completions.append(ended)

    def _message_for_peer(self, message: int) -> int:
        """Return the message as the peer reads it.

        Immediate data is a number. A message in a send is four bytes in the sender's byte order.
        """
        if not self.settings.sends_messages:
            return message
        data = message.to_bytes(4, self.settings.byte_order)
        return int.from_bytes(data, self.peer.settings.byte_order)

    def _check_receives(self) -> None:
        repeats = not self.settings.sends_messages  # receiver-not-ready, on InfiniBand and RoCE
        need_receive = [op for op in self.undelivered if op in USES_CREDIT or not repeats]
        assert len(need_receive) <= self.peer.settings.messages, "the peer has too few receives"

    def _arrive(self, message: int) -> None:
        del self.undelivered[0]
        self.peer.receive(message)

    def receive(self, message: int) -> None:
        self.protocol.received(message)
        self.post_controls()

    def store(self, target: Segment, payload: bytes) -> None:
        """Write `payload` to the memory of this side, as a request of the peer."""
        for area, memory in (
            (self.settings.buffer, self.buffer),
            (self.settings.target_sgl, self.sgl_memory),
        ):
            if contains(area, target):
                start = target.addr - area.addr
                memory[start : start + target.length] = payload
                return
        raise AssertionError(f"a write outside of the memory of the receiving side: {target}")

    def deliver(self, count: int = 1 << 30) -> None:
        """Deliver the oldest `count` writes and messages to the peer."""
        for _ in range(min(count, len(self.in_flight))):
            self.in_flight.popleft()()

    def complete(self) -> None:
        """Complete the oldest control message of this side."""
        if self.completions:
            self.completions.popleft()()
            self.post_controls()


def _side(one: Settings | Side) -> Side:
    return one if isinstance(one, Side) else Side(one)


class Pair:
    """Two connected sides. start() starts both."""

    def __init__(self, one: Settings | Side, other: Settings | Side) -> None:
        self.sides = _side(one), _side(other)
        self.sides[0].peer, self.sides[1].peer = self.sides[1], self.sides[0]

    def start(self) -> Pair:
        for side in self.sides:
            side.start()
        self.deliver_all()
        return self

    def deliver_all(self) -> None:
        """Deliver and complete everything that is in flight."""
        while any(side.in_flight or side.completions for side in self.sides):
            for side in self.sides:
                side.deliver()
                side.complete()

    def drain(self, unsent: list[bytes], step: int) -> None:
        """Send the unsent bytes of each side in pieces of `step`, read all, and finish both."""
        rest = list(unsent)
        while not all(side.state is StreamState.ENDED for side in self.sides):
            before = self._progress()
            for number, side in enumerate(self.sides):
                side.start()
                rest[number] = rest[number][side.write(rest[number][:step]) :]
                if not rest[number]:
                    side.finish()
            self.deliver_all()
            for side in self.sides:
                side.read(step)
            self.deliver_all()
            assert self._progress() != before, "no side makes progress"
        for side in self.sides:
            while side.read(step):
                pass
        self.deliver_all()

    def _progress(self) -> list[tuple[int, int, StreamState]]:
        return [(len(s.written), len(s.received), s.state) for s in self.sides]


def connected(one: Settings, other: Settings | None = None) -> tuple[Side, Side]:
    """Return two sides that have started, with nothing in flight."""
    return Pair(one, other or one).start().sides


class Script:
    """A StreamProtocol. The test acts as its peer."""

    def __init__(self, own: Settings, peer: ConnectionData | None = None) -> None:
        self.settings = own
        self.peer = peer or ConnectionData(
            8, Segment(0x5000, 55, TARGETS), Segment(0x6000, 66, 100), own.byte_order
        )
        self.sgl_memory = bytearray(own.target_sgl.length)
        self.protocol = StreamProtocol(own, memoryview(self.sgl_memory))

    def start(self) -> Script:
        self.protocol.start(self.peer.pack())
        return self

    def receive(self, op: Op, value: int) -> None:
        self.protocol.received(pack_message(op, value))

    def receive_control(self, control: Control) -> None:
        self.receive(Op.CONTROL, control)

    def write_target(self, entry: int, packed: bytes) -> None:
        """Write an entry of the target SGL, as the peer does."""
        self.sgl_memory[entry * SEGMENT_SIZE : (entry + 1) * SEGMENT_SIZE] = packed

    def posted(self) -> list[OutgoingMessage]:
        """Return all control messages to post. Each completes at once."""
        requests = []
        while request := self.protocol.next_control_message():
            requests.append(request)
            self.protocol.control_completed()
        return requests

    def posted_controls(self) -> list[Control]:
        """Return those of posted() that are of Op.CONTROL."""
        messages = [unpack_message(request.message) for request in self.posted()]
        return [Control(value) for op, value in messages if op == Op.CONTROL]

    def consume(self, nbytes: int, message_size: int = 1 << 29) -> None:
        """Receive and read `nbytes`, in messages of `message_size`."""
        for start in range(0, nbytes, message_size):
            size = min(message_size, nbytes - start)
            self.receive(Op.DATA, size)
            self.protocol.inbound.consume(size)


def started(**options: Any) -> Script:
    """Return a Script that has announced its second half."""
    script = Script(settings(**options)).start()
    assert len(script.posted()) == 1
    return script
