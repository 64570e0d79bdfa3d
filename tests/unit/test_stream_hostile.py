"""Streams with a peer that sends and writes arbitrary data, and arbitrary use of their SendRing."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from stream_sides import ORDERS, Script, contains, settings

from aiordma import ProtocolError
from aiordma._native import fast_path
from aiordma.streams import wire
from aiordma.streams.protocol import Settings
from aiordma.streams.wire import ConnectionData, Control, Mapping, Op, Segment, pack_message

MAPPINGS = 3
U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1


class Hostile(Script):
    """One side with a hostile peer, and the memory that the peer has announced.

    Its methods are the steps of a test.
    """

    def __init__(self, own: Settings, peer: ConnectionData) -> None:
        super().__init__(own)
        self.peer = peer
        self.known_targets = [peer.buffer]
        length = peer.targets.length * wire.SEGMENT_SIZE + peer.mappings * wire.MAPPING_SIZE
        self.peer_lists = peer.targets._replace(length=length)
        self.announced_bytes = own.buffer.length // 2
        self.received_bytes = 0

    def message(self, message: int) -> None:
        before = self.protocol.inbound.available
        self.protocol.received(message)
        self.received_bytes += self.protocol.inbound.available - before

    def overwrite(self, at: int, data: bytes) -> None:
        memory = self.sgl_memory
        at %= len(memory)
        memory[at : at + len(data)] = data[: len(memory) - at]
        for start in range(0, wire.TARGETS * wire.SEGMENT_SIZE, wire.SEGMENT_SIZE):
            entry = bytes(memory[start : start + wire.SEGMENT_SIZE])
            self.known_targets.append(wire.unpack_segment(entry, self.settings.byte_order))

    def write(self, nbytes: int) -> None:
        room = self.protocol.room
        assert room <= wire.MAX_TRANSFER
        if room:
            target = self.protocol.send(min(nbytes, room)).target
            assert target.length == min(nbytes, room)
            assert any(contains(area, target) for area in self.known_targets)

    def read(self, limit: int) -> None:
        inbound = self.protocol.inbound
        start, length = inbound.readable(limit)
        assert 0 <= length <= min(limit, inbound.available)
        assert 0 <= start <= start + length <= self.settings.buffer.length
        inbound.consume(length)

    def announce(self, index: int) -> None:
        if self.protocol.outbound.credits and index < self.peer.mappings:
            request = self.protocol.announce(index, Mapping(0, Segment(0, 0, 0)))
            assert contains(self.peer_lists, request.target)

    def post_controls(self, completes: bool) -> None:
        while request := self.protocol.next_control_message():
            if request.payload:
                self.announced_bytes += self.settings.buffer.length // 2
                assert contains(self.peer_lists, request.target)
            if completes:
                self.protocol.control_completed()

    def end(self, how: str) -> None:
        getattr(self.protocol, how)()

    def check(self) -> None:
        inbound, outbound = self.protocol.inbound, self.protocol.outbound
        assert 0 <= inbound.available <= self.received_bytes <= self.announced_bytes
        assert inbound.available <= self.settings.buffer.length
        for mapping in outbound.mappings.values():
            assert outbound.find_mapped(mapping.offset, mapping.segment.length) is not None


OWN = st.builds(
    settings,
    st.integers(2, 100),
    st.integers(8, 40),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.just(MAPPINGS),
)
ADDRESSES = st.one_of(st.integers(0, U64 >> 1), st.integers(U64 - 100, U64))
ENTRIES = st.builds(
    Segment, ADDRESSES, st.integers(0, U32), st.one_of(st.integers(0, 200), st.integers(0, U32))
)


def is_within_memory(data: ConnectionData) -> bool:
    with suppress(ProtocolError):
        ConnectionData.unpack(data.pack())
        return True
    return False


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
PACKED_ENTRIES = st.builds(wire.pack_segment, ENTRIES, st.sampled_from(ORDERS))
STEPS = st.one_of(
    st.tuples(st.just("message"), PLAUSIBLE),
    st.tuples(st.just("message"), st.one_of(PLAUSIBLE, PLAUSIBLE, st.integers(0, U32))),
    st.tuples(st.just("overwrite"), st.sampled_from([0, wire.SEGMENT_SIZE]), PACKED_ENTRIES),
    st.tuples(st.just("overwrite"), st.integers(0, 200), st.binary(min_size=1, max_size=40)),
    st.tuples(st.sampled_from(["write", "read"]), st.integers(1, 100)),
    st.tuples(st.just("announce"), st.integers(0, 5)),
    st.tuples(st.just("post_controls"), st.booleans()),
    st.tuples(st.just("end"), st.sampled_from(["finish", "leave", "connection_lost"])),
)


@how(max_examples=300, deadline=None, derandomize=True)
@given(OWN, PEERS, st.lists(STEPS, max_size=60))
def test_a_hostile_peer_harms_only_itself(
    own: Settings, peer: ConnectionData, steps: list[tuple[Any, ...]]
) -> None:
    hostile = Hostile(own, peer)
    hostile.start()
    for name, *arguments in steps:
        try:
            getattr(hostile, name)(*arguments)
        except ProtocolError:
            assert name == "message"
            break
        hostile.check()
    hostile.check()


@how(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.lists(st.one_of(st.none(), st.integers(0, 80)), max_size=80))
def test_parts_of_a_send_ring_follow_each_other(size: int, steps: list[int | None]) -> None:
    """None releases the oldest part, a number reserves one."""
    ring = fast_path.SendRing(size)
    reserved: deque[int] = deque()
    at = 0
    for nbytes in steps:
        if nbytes is not None:
            expected = min(nbytes, ring.free, size - at)
            assert ring.reserve(nbytes) == (at, expected)
            reserved.append(expected)
            at = (at + expected) % size
        elif reserved:
            ring.release(reserved.popleft())
        assert ring.free == size - sum(reserved)
