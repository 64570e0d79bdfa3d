"""Streams with a peer that sends and writes arbitrary data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fakes.streams import MAPPINGS, ORDERS, Script, contains, sides
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

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
    """One side with a hostile peer, and the memory that the peer has announced."""

    def __init__(self, own: Settings, peer: ConnectionData) -> None:
        self.script = Script(own, peer)
        self.protocol = self.script.protocol
        self.known_targets = [peer.buffer]
        length = peer.targets.length * SEGMENT_SIZE + peer.mappings * MAPPING_SIZE
        self.peer_lists = peer.targets._replace(length=length)
        self.announced_bytes = own.buffer.length // 2
        self.received_bytes = 0

    def receive(self, message: int) -> None:
        before = self.protocol.inbound.available
        self.protocol.received(message)
        self.received_bytes += self.protocol.inbound.available - before

    def overwrite(self, at: int, data: bytes) -> None:
        memory = self.script.sgl_memory
        at %= len(memory)
        memory[at : at + len(data)] = data[: len(memory) - at]
        order = self.script.settings.byte_order
        for start in range(0, TARGETS * SEGMENT_SIZE, SEGMENT_SIZE):
            entry = unpack_segment(bytes(memory[start : start + SEGMENT_SIZE]), order)
            self.known_targets.append(entry)

    def write(self, nbytes: int) -> None:
        room = self.protocol.room
        assert room <= MAX_TRANSFER
        if room:
            target = self.protocol.send(min(nbytes, room)).target
            assert target.length == min(nbytes, room)
            assert any(contains(area, target) for area in self.known_targets)

    def read(self, limit: int) -> None:
        inbound = self.protocol.inbound
        start, length = inbound.readable(limit)
        assert 0 <= length <= min(limit, inbound.available)
        assert 0 <= start <= start + length <= self.script.settings.buffer.length
        inbound.consume(length)

    def announce(self, index: int) -> None:
        if self.protocol.outbound.credits and index < self.script.peer.mappings:
            request = self.protocol.announce(index, Mapping(0, Segment(0, 0, 0)))
            assert contains(self.peer_lists, request.target)

    def post_controls(self, completes: bool) -> None:
        for _ in range(10):
            request = self.protocol.next_control_message()
            if request is None:
                return
            if request.payload:
                self.announced_bytes += self.script.settings.buffer.length // 2
                assert contains(self.peer_lists, request.target)
            if completes:
                self.protocol.control_completed()

    def check(self) -> None:
        inbound = self.protocol.inbound
        assert 0 <= inbound.available <= self.received_bytes <= self.announced_bytes
        assert inbound.available <= self.script.settings.buffer.length
        for mapping in self.protocol.outbound.mappings.values():
            segment = self.protocol.outbound.find_mapped(mapping.offset, mapping.segment.length)
            assert segment is not None


ADDRESSES = st.one_of(st.integers(0, U64 >> 1), st.integers(U64 - 100, U64))
ENTRIES = st.builds(
    Segment, ADDRESSES, st.integers(0, U32), st.one_of(st.integers(0, 200), st.integers(0, U32))
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
    st.builds(Segment, ADDRESSES, st.integers(0, U32), st.integers(2, 5)),
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
PACKED_ENTRIES = ENTRIES.flatmap(
    lambda entry: st.sampled_from([pack_segment(entry, order) for order in ORDERS])
)
ENTRY_OFFSETS = st.sampled_from([0, SEGMENT_SIZE])
STEPS = st.one_of(
    st.tuples(st.just("receive"), PLAUSIBLE),
    st.tuples(st.just("receive"), st.one_of(PLAUSIBLE, PLAUSIBLE, st.integers(0, U32))),
    st.tuples(st.just("write_target"), ENTRY_OFFSETS, PACKED_ENTRIES),
    st.tuples(st.just("overwrite"), st.integers(0, 200), st.binary(min_size=1, max_size=40)),
    st.tuples(st.sampled_from(["write", "read"]), st.integers(1, 100)),
    st.tuples(st.just("announce"), st.integers(0, 5)),
    st.tuples(st.just("post_controls"), st.booleans()),
    st.tuples(st.sampled_from(["finish", "leave", "lost"])),
)


def apply_step(hostile: Hostile, step: tuple[Any, ...]) -> None:
    match step:
        case ("receive", message):
            hostile.receive(message)
        case ("write_target" | "overwrite", at, data):
            hostile.overwrite(at, data)
        case ("write", nbytes):
            hostile.write(nbytes)
        case ("read", limit):
            hostile.read(limit)
        case ("announce", index):
            hostile.announce(index)
        case ("post_controls", completes):
            hostile.post_controls(completes)
        case ("finish",):
            hostile.protocol.finish()
        case ("leave",):
            hostile.protocol.leave()
        case ("lost",):
            hostile.protocol.connection_lost()


@how(max_examples=300, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), PEERS, st.lists(STEPS, max_size=60))
def test_a_hostile_peer_harms_only_itself(
    own: Settings, peer: ConnectionData, steps: list[tuple[Any, ...]]
) -> None:
    hostile = Hostile(own, peer)
    hostile.protocol.start(peer.pack())
    for step in steps:
        try:
            apply_step(hostile, step)
        except ProtocolError:
            assert step[0] == "receive"
            break
        hostile.check()
    hostile.check()


@how(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), st.binary(max_size=60), st.lists(PLAUSIBLE, max_size=20))
def test_any_connection_data_is_accepted_or_refused(
    own: Settings, data: bytes, early: list[int]
) -> None:
    protocol = Script(own).protocol
    for message in early:
        protocol.received(message)
    assert protocol.inbound.available == protocol.room == 0
    for data_of_peer in data, b"\x01" + data, connection_data(own):
        with suppress(ProtocolError):
            protocol.start(data_of_peer)


def connection_data(own: Settings) -> bytes:
    return Script(own).protocol.connection_data()
