"""Streams that two sides lead over a network of any delay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from stream_fakes import MAPPINGS, ORDERS, Pair, Side, settings, sides

from aiordma.streams.protocol import Settings
from aiordma.streams.states import StreamState
from aiordma.streams.wire import Mapping, Segment

BUSY = ["start", "write", "read", "deliver", "complete", "announce"]
CALM = [*BUSY, *BUSY, "finish"]
RUDE = [*CALM, "leave"]

PAIRS = st.booleans().flatmap(lambda form: st.tuples(sides(form), sides(form)))
NUMBERS = st.integers(1, 60)


def schedules(acts: list[str]) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    step = st.tuples(st.integers(0, 1), st.sampled_from(acts), NUMBERS)
    return st.lists(step, max_size=120)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(600)


def do(side: Side, act: str, size: int, source: bytes) -> None:
    match act:
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


def lead(pair: Pair, schedule: list[tuple[int, str, int]], sources: list[bytes]) -> None:
    for number, act, size in schedule:
        do(pair.sides[number], act, size, sources[number])


def check_the_end(pair: Pair) -> None:
    for side in pair.sides:
        assert side.protocol.state is StreamState.ENDED
        assert side.protocol.all_controls_completed
        assert not side.protocol.room
        assert not side.on_the_way


@how(max_examples=120, deadline=None, derandomize=True)
@given(PAIRS, schedules(CALM), NUMBERS)
def test_every_byte_arrives_in_order(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, sources = Pair(*both), [content(0), content(1)]
    lead(pair, schedule, sources)
    left = [
        source[len(side.written) :] if side.protocol.state.may_send else b""
        for side, source in zip(pair.sides, sources, strict=True)
    ]
    pair.drain(left, step)
    for side, source in zip(pair.sides, sources, strict=True):
        assert side.peer.got == side.written == source[: len(side.written)]
        assert side.peer.protocol.outbound.mappings == side.mapped
    check_the_end(pair)


@how(max_examples=120, deadline=None, derandomize=True)
@given(PAIRS, schedules(RUDE), NUMBERS)
def test_what_was_written_before_leaving_arrives(
    both: tuple[Settings, Settings], schedule: list[tuple[int, str, int]], step: int
) -> None:
    pair, sources = Pair(*both), [content(2), content(3)]
    lead(pair, schedule, sources)
    pair.drain([b"", b""], step)
    for side in pair.sides:
        assert side.written.startswith(side.peer.got)
        if not side.peer.left:
            assert side.peer.got == side.written
    check_the_end(pair)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_exchange_keeps_every_byte(seed: int) -> None:
    """Over which all counters and rings go round many times."""
    source = random.Random(seed)
    form = seed % 2 == 1
    pair = Pair(
        *(
            settings(
                buffer=source.choice([2, 7, 64, 1000]),
                messages=source.choice([16, 17, 40]),
                byte_order=source.choice(ORDERS),
                sends_messages=form,
                mappings=MAPPINGS,
            )
            for _ in range(2)
        )
    )
    data = [source.randbytes(1 << 16) for _ in range(2)]
    for _ in range(8000):
        number = source.randrange(2)
        do(pair.sides[number], source.choice(BUSY), source.randrange(1, 60), data[number])
    pair.drain([b"", b""], 100)
    for side, content in zip(pair.sides, data, strict=True):
        assert side.peer.got == side.written == content[: len(side.written)]
        assert len(side.written) > 100
    check_the_end(pair)
