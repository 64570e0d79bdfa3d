"""Streams with a peer that says and writes what it likes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from stream_fakes import MAPPINGS, ORDERS, Script, contains, sides

from aiordma import ProtocolError
from aiordma.streams.protocol import Settings
from aiordma.streams.wire import (
    MAPPING_SIZE,
    MAX_TRANSFER,
    SEGMENT_SIZE,
    TARGETS,
    ConnectionData,
    Control,
    Mapping,
    Op,
    Segment,
    pack_message,
    pack_segment,
    unpack_segment,
)

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1


class Hostile:
    """One side, and what its peer has named; the peer does as it likes."""

    def __init__(self, own: Settings, peer: ConnectionData) -> None:
        self.script = Script(own, peer)
        self.protocol = self.script.protocol
        self.named = [peer.buffer]
        length = peer.targets.length * SEGMENT_SIZE + peer.mappings * MAPPING_SIZE
        self.list = peer.targets._replace(length=length)
        self.announced = own.buffer.length // 2
        self.came = 0

    def hear(self, message: int) -> None:
        before = self.protocol.inbound.available
        self.protocol.received(message)
        self.came += self.protocol.inbound.available - before

    def scribble(self, at: int, data: bytes) -> None:
        board = self.script.board
        at %= len(board)
        board[at : at + len(data)] = data[: len(board) - at]
        order = self.script.settings.byte_order
        for start in range(0, TARGETS * SEGMENT_SIZE, SEGMENT_SIZE):
            entry = unpack_segment(bytes(board[start : start + SEGMENT_SIZE]), order)
            self.named.append(entry)

    def write(self, nbytes: int) -> None:
        room = self.protocol.room
        assert room <= MAX_TRANSFER
        if room:
            target = self.protocol.send(min(nbytes, room)).target
            assert target.length == min(nbytes, room)
            assert any(contains(area, target) for area in self.named)

    def read(self, limit: int) -> None:
        inbound = self.protocol.inbound
        start, length = inbound.readable(limit)
        assert 0 <= length <= min(limit, inbound.available)
        assert 0 <= start <= start + length <= self.script.settings.buffer.length
        inbound.consume(length)

    def announce(self, index: int) -> None:
        if self.protocol.outbound.credits and index < self.script.peer.mappings:
            request = self.protocol.announce(index, Mapping(0, Segment(0, 0, 0)))
            assert contains(self.list, request.target)

    def pump(self, done: bool) -> None:
        for _ in range(10):
            request = self.protocol.next_control_message()
            if request is None:
                return
            if request.payload:
                self.announced += self.script.settings.buffer.length // 2
                assert contains(self.list, request.target)
            if done:
                self.protocol.control_completed()

    def check(self) -> None:
        inbound = self.protocol.inbound
        assert 0 <= inbound.available <= self.came <= self.announced
        assert inbound.available <= self.script.settings.buffer.length
        for mapping in self.protocol.outbound.mappings.values():
            place = self.protocol.outbound.find_mapped(mapping.offset, mapping.segment.length)
            assert place is not None


HIGH = st.one_of(st.integers(0, U64 >> 1), st.integers(U64 - 100, U64))
ENTRIES = st.builds(
    Segment, HIGH, st.integers(0, U32), st.one_of(st.integers(0, 200), st.integers(0, U32))
)


def is_within_memory(data: ConnectionData) -> bool:
    try:
        ConnectionData.unpack(data.pack())
    except ProtocolError:
        return False
    return True


PEERS = st.builds(
    ConnectionData,
    st.integers(0, U16),
    st.builds(Segment, HIGH, st.integers(0, U32), st.integers(2, 5)),
    ENTRIES,
    st.sampled_from(ORDERS),
    st.integers(0, 5),
).filter(is_within_memory)

PLAUSIBLE = st.one_of(
    st.builds(pack_message, st.just(Op.DATA), st.integers(0, 60)),
    st.builds(pack_message, st.sampled_from([Op.CREDIT, Op.IOMAP]), st.integers(0, U16 + 9)),
    st.builds(pack_message, st.just(Op.IOMAP), st.integers(0, MAPPINGS)),
    st.builds(pack_message, st.just(Op.CONTROL), st.sampled_from(Control)),
)
SHOWN = ENTRIES.flatmap(
    lambda entry: st.sampled_from([pack_segment(entry, order) for order in ORDERS])
)
PLACES = st.sampled_from([0, SEGMENT_SIZE])
STEPS = st.one_of(
    st.tuples(st.just("hear"), PLAUSIBLE),
    st.tuples(st.just("hear"), st.one_of(PLAUSIBLE, PLAUSIBLE, st.integers(0, U32))),
    st.tuples(st.just("show"), PLACES, SHOWN),
    st.tuples(st.just("scribble"), st.integers(0, 200), st.binary(min_size=1, max_size=40)),
    st.tuples(st.sampled_from(["write", "read"]), st.integers(1, 100)),
    st.tuples(st.just("announce"), st.integers(0, 5)),
    st.tuples(st.just("pump"), st.booleans()),
    st.tuples(st.sampled_from(["finish", "leave", "lost"])),
)


def suffer(hostile: Hostile, step: tuple[Any, ...]) -> None:
    match step:
        case ("hear", message):
            hostile.hear(message)
        case ("show" | "scribble", at, data):
            hostile.scribble(at, data)
        case ("write", nbytes):
            hostile.write(nbytes)
        case ("read", limit):
            hostile.read(limit)
        case ("announce", index):
            hostile.announce(index)
        case ("pump", done):
            hostile.pump(done)
        case ("finish",):
            hostile.protocol.finish()
        case ("leave",):
            hostile.protocol.leave()
        case ("lost",):
            hostile.protocol.connection_lost()


@how(max_examples=300, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), PEERS, st.lists(STEPS, max_size=60))
def test_a_hostile_peer_only_harms_itself(
    own: Settings, peer: ConnectionData, steps: list[tuple[Any, ...]]
) -> None:
    hostile = Hostile(own, peer)
    hostile.protocol.start(peer.pack())
    for step in steps:
        try:
            suffer(hostile, step)
        except ProtocolError:
            assert step[0] == "hear"
            break
        hostile.check()
    hostile.check()


@how(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), st.binary(max_size=60), st.lists(PLAUSIBLE, max_size=20))
def test_any_beginning_is_taken_or_refused(own: Settings, data: bytes, early: list[int]) -> None:
    protocol = Script(own).protocol
    for message in early:
        protocol.received(message)
    assert protocol.inbound.available == protocol.room == 0
    for beginning in data, b"\x01" + data, connection_data(own):
        with suppress(ProtocolError):
            protocol.start(beginning)


def connection_data(own: Settings) -> bytes:
    return Script(own).protocol.connection_data()
