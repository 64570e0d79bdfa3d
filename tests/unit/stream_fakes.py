"""Two sides of a stream and the network between them: memory, keys, and requests on their way."""

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
BOARD, BOARD_KEY = 0x7F00_0000_0000, 22
MAPPINGS = 3
COUNTED = {Op.DATA, Op.IOMAP}


def contains(outer: Segment, inner: Segment) -> bool:
    """Whether a write to `inner` stays within `outer`, and uses its key."""
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
        Segment(BOARD, BOARD_KEY, target_sgl_size(mappings)),
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
    """A StreamProtocol with memory, whose requests travel to `peer` when deliver() says so."""

    peer: Side

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.board = bytearray(settings.target_sgl.length)
        self.buffer = bytearray(settings.buffer.length)
        self.protocol = StreamProtocol(settings, memoryview(self.board))
        self.announced = deque([self.protocol.inbound.first_buffer])
        self.mapped: dict[int, Mapping] = {}
        self.written = bytearray()
        self.got = bytearray()
        self.on_the_way: deque[Callable[[], None]] = deque()
        self.completions: deque[Callable[[], None]] = deque()
        self.undelivered: list[Op] = []
        self.started = self.left = False

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.protocol.start(self.peer.connection_data() + bytes(20))
            self.pump()

    def connection_data(self) -> bytes:
        return self.protocol.connection_data()

    @property
    def state(self) -> StreamState:
        return self.protocol.state

    # --- what the application does ---

    def write(self, data: bytes) -> int:
        """Send as much of it as may be sent with one message."""
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
        self.got += data
        self.pump()
        return data

    def announce(self, index: int, mapping: Mapping) -> None:
        self.mapped[index] = mapping
        request = self.protocol.announce(index, mapping)
        assert contains(self.peer.settings.target_sgl, request.target)
        self._post(request, request.payload)

    def finish(self) -> None:
        self.protocol.finish()
        self.pump()

    def leave(self) -> None:
        self.left = True
        self.protocol.leave()
        self.pump()

    def pump(self) -> None:
        while request := self.protocol.next_control_message():
            if request.payload:
                assert len(request.payload) == SEGMENT_SIZE
                assert contains(self.peer.settings.target_sgl, request.target)
                order = self.peer.settings.byte_order
                self.announced.append(unpack_segment(request.payload, order))
            self._post(request, request.payload, self.protocol.control_completed)

    # --- what the devices do ---

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
        message = self._as_the_peer_sees(request.message)
        self.undelivered.append(Op(unpack_message(request.message)[0]))
        self._check_receives()
        if payload:
            half = len(payload) // 2
            first, second = payload[:half], payload[half:]
            rest = Segment(target.addr + half, target.key, len(second))
            self.on_the_way.append(lambda: peer.store(target._replace(length=half), first))
            self.on_the_way.append(lambda: peer.store(rest, second))
        self.on_the_way.append(lambda: self._arrive(message))
        if ended is not None:
            self.completions.append(ended)

    def _as_the_peer_sees(self, message: int) -> int:
        """Immediate data is a number, a message that travels alone is four bytes."""
        if not self.settings.sends_messages:
            return message
        data = message.to_bytes(4, self.settings.byte_order)
        return int.from_bytes(data, self.peer.settings.byte_order)

    def _check_receives(self) -> None:
        waits = not self.settings.sends_messages
        needing = [op for op in self.undelivered if op in COUNTED or not waits]
        assert len(needing) <= self.peer.settings.messages, "the peer has not so many receives"

    def _arrive(self, message: int) -> None:
        del self.undelivered[0]
        self.peer.receive(message)

    def receive(self, message: int) -> None:
        self.protocol.received(message)
        self.pump()

    def store(self, target: Segment, payload: bytes) -> None:
        """A write of the peer's lands."""
        for area, memory in (
            (self.settings.buffer, self.buffer),
            (self.settings.target_sgl, self.board),
        ):
            if contains(area, target):
                start = target.addr - area.addr
                memory[start : start + target.length] = payload
                return
        raise AssertionError(f"a write outside of the peer's memory: {target}")

    def deliver(self, count: int = 1 << 30) -> None:
        """The oldest writes and messages on their way to the peer get there."""
        for _ in range(min(count, len(self.on_the_way))):
            self.on_the_way.popleft()()

    def complete(self) -> None:
        """This side hears that its oldest control request is done."""
        if self.completions:
            self.completions.popleft()()
            self.pump()


def _side(one: Settings | Side) -> Side:
    return one if isinstance(one, Side) else Side(one)


class Pair:
    """Two sides that are connected; each is to start()."""

    def __init__(self, one: Settings | Side, other: Settings | Side) -> None:
        self.sides = _side(one), _side(other)
        self.sides[0].peer, self.sides[1].peer = self.sides[1], self.sides[0]

    def start(self) -> Pair:
        for side in self.sides:
            side.start()
        self.settle()
        return self

    def settle(self) -> None:
        """Everything that is on its way arrives."""
        while any(side.on_the_way or side.completions for side in self.sides):
            for side in self.sides:
                side.deliver()
                side.complete()

    def drain(self, left: list[bytes], step: int) -> None:
        """Deal fairly: what is `left` is sent, in pieces of `step`, read, and then finished."""
        rest = list(left)
        while not all(side.state is StreamState.ENDED for side in self.sides):
            before = self._progress()
            for number, side in enumerate(self.sides):
                side.start()
                rest[number] = rest[number][side.write(rest[number][:step]) :]
                if not rest[number]:
                    side.finish()
            self.settle()
            for side in self.sides:
                side.read(step)
            self.settle()
            assert self._progress() != before, "nobody gets any further"
        for side in self.sides:
            while side.read(step):
                pass
        self.settle()

    def _progress(self) -> list[tuple[int, int, StreamState]]:
        return [(len(s.written), len(s.got), s.state) for s in self.sides]


def connected(one: Settings, other: Settings | None = None) -> tuple[Side, Side]:
    """Two sides that have started, and have nothing on their way."""
    return Pair(one, other or one).start().sides


class Script:
    """A StreamProtocol whose peer is played by the test."""

    def __init__(self, own: Settings, peer: ConnectionData | None = None) -> None:
        self.settings = own
        self.peer = peer or ConnectionData(
            8, Segment(0x5000, 55, TARGETS), Segment(0x6000, 66, 100), own.byte_order
        )
        self.board = bytearray(own.target_sgl.length)
        self.protocol = StreamProtocol(own, memoryview(self.board))

    def start(self) -> Script:
        self.protocol.start(self.peer.pack())
        return self

    def hear(self, op: Op, value: int) -> None:
        self.protocol.received(pack_message(op, value))

    def hear_control(self, word: Control) -> None:
        self.hear(Op.CONTROL, word)

    def show(self, entry: int, packed: bytes) -> None:
        """The peer writes a target."""
        self.board[entry * SEGMENT_SIZE : (entry + 1) * SEGMENT_SIZE] = packed

    def said(self) -> list[OutgoingMessage]:
        """All that is to be posted, each of which is done at once."""
        requests = []
        while request := self.protocol.next_control_message():
            requests.append(request)
            self.protocol.control_completed()
        return requests

    def words(self) -> list[Control]:
        """The control messages of those."""
        messages = [unpack_message(request.message) for request in self.said()]
        return [Control(value) for op, value in messages if op == Op.CONTROL]

    def consume(self, nbytes: int, at_once: int = 1 << 29) -> None:
        """So many bytes come, in messages of `at_once`, and are read."""
        for start in range(0, nbytes, at_once):
            size = min(at_once, nbytes - start)
            self.hear(Op.DATA, size)
            self.protocol.inbound.consume(size)


def started(**how: Any) -> Script:
    """One that has announced its second half."""
    script = Script(settings(**how)).start()
    assert len(script.said()) == 1
    return script
