"""Streams of two sides over a network with random delays."""

from __future__ import annotations

import random

import pytest
from fakes.streams import MAPPINGS, ORDERS, Pair, Side, settings, sides
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from aiordma.streams.protocol import Settings
from aiordma.streams.states import StreamState
from aiordma.streams.wire import Mapping, Segment

ACTIONS = ["start", "write", "read", "deliver", "complete", "announce"]
WITH_FINISH = [*ACTIONS, *ACTIONS, "finish"]
WITH_LEAVE = [*WITH_FINISH, "leave"]

PAIRS = st.booleans().flatmap(
    lambda sends_messages: st.tuples(sides(sends_messages), sides(sends_messages))
)
NUMBERS = st.integers(1, 60)


def schedules(actions: list[str]) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    step = st.tuples(st.integers(0, 1), st.sampled_from(actions), NUMBERS)
    return st.lists(step, max_size=120)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(600)


def perform(side: Side, action: str, size: int, source: bytes) -> None:
    match action:
        case "start":
            side.start()
        case "write":
            side.write(source[len(side.written) :][:size])
        case "read":
            side.read(size)
        case "deliver":
            side.deliver(size)
        case "complete":
            side.complete()
        case "announce":
            if side.protocol.outbound.credits and side.protocol.state.may_send:
                index = size % MAPPINGS
                side.announce(index, Mapping(size, Segment(1 << size, size, size)))
        case "finish":
            side.finish()
        case "leave":
            side.leave()


def run_schedule(pair: Pair, schedule: list[tuple[int, str, int]], sources: list[bytes]) -> None:
    for number, action, size in schedule:
        perform(pair.sides[number], action, size, sources[number])


def check_end(pair: Pair) -> None:
    for side in pair.sides:
        assert side.protocol.state is StreamState.ENDED
        assert side.protocol.all_controls_completed
        assert not side.protocol.room
        assert not side.in_flight


@how(max_examples=120, deadline=None, derandomize=True)
@given(PAIRS, schedules(WITH_FINISH), NUMBERS)
def test_every_byte_arrives_in_order(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, sources = Pair(*both), [content(0), content(1)]
    run_schedule(pair, schedule, sources)
    unsent = [
        source[len(side.written) :] if side.protocol.state.may_send else b""
        for side, source in zip(pair.sides, sources, strict=True)
    ]
    pair.drain(unsent, step)
    for side, source in zip(pair.sides, sources, strict=True):
        assert side.peer.received == side.written == source[: len(side.written)]
        assert side.peer.protocol.outbound.mappings == side.mapped
    check_end(pair)


@how(max_examples=120, deadline=None, derandomize=True)
@given(PAIRS, schedules(WITH_LEAVE), NUMBERS)
def test_bytes_written_before_leaving_arrive(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, sources = Pair(*both), [content(2), content(3)]
    run_schedule(pair, schedule, sources)
    pair.drain([b"", b""], step)
    for side in pair.sides:
        assert side.written.startswith(side.peer.received)
        if not side.peer.has_left:
            assert side.peer.received == side.written
    check_end(pair)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_exchange_keeps_every_byte(seed: int) -> None:
    """All counters and rings wrap around many times."""
    source = random.Random(seed)
    sends_messages = seed % 2 == 1
    pair = Pair(
        *(
            settings(
                buffer=source.choice([2, 7, 64, 1000]),
                messages=source.choice([16, 17, 40]),
                byte_order=source.choice(ORDERS),
                sends_messages=sends_messages,
                mappings=MAPPINGS,
            )
            for _ in range(2)
        )
    )
    data = [source.randbytes(1 << 16) for _ in range(2)]
    for _ in range(8000):
        number = source.randrange(2)
        perform(pair.sides[number], source.choice(ACTIONS), source.randrange(1, 60), data[number])
    pair.drain([b"", b""], 100)
    for side, content in zip(pair.sides, data, strict=True):
        assert side.peer.received == side.written == content[: len(side.written)]
        assert len(side.written) > 100
    check_end(pair)
