"""Streams between aiordma and a model of rsocket.c, over a network with random delays."""

from __future__ import annotations

import random

import pytest
from fakes.rsocket_model import Rsocket
from fakes.streams import MAPPINGS, ORDERS, Pair, Side, settings
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma.streams.protocol import Settings
from aiordma.streams.states import StreamState
from aiordma.streams.wire import ByteOrder, Mapping, Segment

ACTIONS = ["start", "write", "read", "deliver", "complete", "write", "read", "deliver", "complete"]
WITH_FINISH = [*ACTIONS, *ACTIONS, "announce", "finish"]
WITH_LEAVE = [*WITH_FINISH, "leave"]


def sides(sends_messages: bool) -> st.SearchStrategy[tuple[Settings, Settings]]:
    """Return the settings of both sides.

    On iWARP rsocket.c does not swap messages, so both sides must have the same byte order.
    """

    def one(order: ByteOrder) -> st.SearchStrategy[Settings]:
        return st.builds(
            settings,
            buffer=st.integers(1, 50).map(lambda half: 2 * half),
            messages=st.integers(16, 40),
            byte_order=st.just(order) if sends_messages else st.sampled_from(ORDERS),
            sends_messages=st.just(sends_messages),
            mappings=st.just(MAPPINGS),
        )

    return st.sampled_from(ORDERS).flatmap(lambda order: st.tuples(one(order), one(order)))


def schedules(actions: list[str]) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    step = st.tuples(st.integers(0, 1), st.sampled_from(actions), st.integers(1, 60))
    return st.lists(step, max_size=120)


def perform(side: Side, action: str, size: int, source: bytes) -> None:
    match action:
        case "start":
            side.start()
        case "write" if side.state.may_send:
            side.write(source[len(side.written) :][:size])
        case "read":
            side.read(size)
        case "deliver":
            side.deliver(size)
        case "complete":
            side.complete()
        case "announce" if side.started and side.state.may_send and len(side.mapped) < MAPPINGS:
            if isinstance(side, Rsocket) or side.protocol.outbound.credits:
                side.announce(len(side.mapped), Mapping(size, Segment(1 << size, size, size)))
        case "finish":
            side.finish()
        case "leave":
            side.leave()


def run_schedule(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]]
) -> tuple[Pair, list[bytes]]:
    pair = Pair(Side(both[0]), Rsocket(both[1]))
    sources = [random.Random(number).randbytes(600) for number in range(2)]
    for number, action, size in schedule:
        perform(pair.sides[number], action, size, sources[number])
    return pair, sources


@how(max_examples=150, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), schedules(WITH_FINISH), st.integers(1, 60))
def test_every_byte_arrives_in_order(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, sources = run_schedule(both, schedule)
    unsent = [
        source[len(side.written) :] if side.state.may_send else b""
        for side, source in zip(pair.sides, sources, strict=True)
    ]
    pair.drain(unsent, step)
    for side, source in zip(pair.sides, sources, strict=True):
        assert side.peer.received == side.written == source[: len(side.written)]
        assert side.state is StreamState.ENDED
    assert pair.sides[0].protocol.outbound.mappings == pair.sides[1].mapped


@how(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(sides), schedules(WITH_LEAVE), st.integers(1, 60))
def test_bytes_written_before_leaving_arrive(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, _ = run_schedule(both, schedule)
    pair.drain([b"", b""], step)
    for side in pair.sides:
        assert side.written.startswith(side.peer.received)
        if not side.peer.has_left:
            assert side.peer.received == side.written
        assert side.state is StreamState.ENDED


def test_counters_wrap_around() -> None:
    own = settings(buffer=64, messages=16)
    pair = Pair(Side(own), Rsocket(own)).start()
    for number in range(22_000):
        for side in pair.sides:
            for _ in range(3):
                side.write(bytes([number & 0xFF]))
        pair.deliver_all()
        for side in pair.sides:
            side.read(9)
        pair.deliver_all()
    for side in pair.sides:
        assert side.peer.received == side.written
        assert len(side.written) > 1 << 16


@pytest.mark.parametrize("busy", ["rsocket", "aiordma"])
def test_the_receives_of_a_busy_peer_suffice_for_all_messages(busy: str) -> None:
    """On iWARP a message without a receive ends the connection.

    The requests of one side complete before the busy peer takes its completions.
    """
    own = settings(buffer=2 * 32, messages=32, sends_messages=True)
    pair = Pair(Side(own), Rsocket(own)).start()
    sender, busy_side = pair.sides if busy == "rsocket" else pair.sides[::-1]
    while sender.write(b"x"):
        sender.complete()
    for size in [1] * 24 + [32, 32]:
        busy_side.write(bytes(size))
        busy_side.deliver()
    while sender.read(1):
        sender.complete()
    for end in (sender.finish, sender.leave):
        while sender.completions:
            sender.complete()
        end()
    assert len(sender.undelivered) > 30
